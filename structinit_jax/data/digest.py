"""A checksum of the examples of a split, by which a run finds that its data have changed."""

import hashlib

from structinit_jax.data.datasets import ImageSource


def digest(source: ImageSource) -> str | None:
    """Returns a checksum of the examples of a split and of their order, without reading images.

    Image files count by their path within the split and their label, so the folder may be moved.
    Records in a list count by their label. A prepared data set has no checksum, since its labels
    are stored beside the images.
    """
    parts = source.records.parts
    if all(isinstance(records, list) for records, _, _ in parts):
        content = [source.labels().tobytes()]
    elif all(hasattr(records, "digest") for records, _, _ in parts):
        content = [records.digest(start, stop).encode() for records, start, stop in parts]
        content.append(source.kept.tobytes())
    else:
        return None
    return hashlib.sha256(b" ".join(content)).hexdigest()
