"""Computes a checksum of the examples of a split, so that a run notices changed data."""

import hashlib

from structinit_jax.data.datasets import ImageSource


def digest(source: ImageSource) -> str | None:
    """Returns a checksum of the examples of a split and their order, without reading images.

    Covers the path within the split and the label of image files, so the folder may be moved, and
    the label of records in a list. A prepared data set has no checksum, since its labels are stored
    with the images.
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
