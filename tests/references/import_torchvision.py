"""Imports torchvision, which timm needs, beside any build of torch.

Its compiled operators need not fit the installed torch. The reference programs and the benchmarks
use none of them, so it is enough that their names are defined. Import this, or run it with
`runpy.run_path`, before timm.
"""

from torch import library

try:
    import torchvision
except (ImportError, RuntimeError):
    _library = library.Library("torchvision", "DEF")
    for _schema in ("nms(Tensor d, Tensor s, float t) -> Tensor", "qnms(Tensor d) -> Tensor"):
        _library.define(_schema)
    import torchvision  # noqa: F401
