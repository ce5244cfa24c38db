"""Imports torchvision, which timm needs, alongside any build of torch.

Its compiled operators may not match the installed torch. The reference programs and the benchmarks
use none of them, so defining their names is enough. Import this module, or run it with
`runpy.run_path`, before importing timm.
"""

from torch import library

try:
    import torchvision
except (ImportError, RuntimeError):
    _library = library.Library("torchvision", "DEF")
    for _schema in ("nms(Tensor d, Tensor s, float t) -> Tensor", "qnms(Tensor d) -> Tensor"):
        _library.define(_schema)
    import torchvision  # noqa: F401
