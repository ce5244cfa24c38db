"""Makes a TFDS set that was prepared as tfrecord readable without TensorFlow.

TFDS stores the same serialized examples in every file format, so they are copied as they are. The
array_record files come to lie beside the tfrecord files, which stay.
"""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from structinit_jax.errors import InputError

ARRAY_RECORD = tfds.core.FileFormat.ARRAY_RECORD


def read_tfrecord(path: Path) -> Iterator[bytes]:
    """Yields the records of a file: for each its length, a checksum, the bytes and a checksum.

    The checksums (CRC-32C) are not verified; a file that is cut short is noticed.

    Args:
      path: A tfrecord file.

    Raises:
      InputError: The file ends within a record.
    """
    with path.open("rb") as file:
        while header := file.read(12):
            length = struct.unpack("<Q", header[:8])[0] if len(header) == 12 else 0
            # Read with the checksum behind it; a nonsense length must not be allocated.
            remaining = os.fstat(file.fileno()).st_size - file.tell()
            if len(header) < 12 or length + 4 > remaining:
                raise InputError(f"{path}: ends within a record. Prepare or copy the set again.")
            yield file.read(length + 4)[:length]


def add_array_record(builder: tfds.core.DatasetBuilder) -> None:
    """Converts every split of a set that is prepared as tfrecord.

    The set's description names the new files only when all are written, so an interrupted
    conversion is done again.

    Args:
      builder: The builder of the set.

    Raises:
      InputError: A file is missing or damaged, or the folder cannot be written to.
    """
    folder = Path(builder.data_path)
    adapter = tfds.core.file_adapters.ADAPTER_FOR_FORMAT[ARRAY_RECORD]
    try:
        for split in builder.info.splits.values():
            for name, count in zip(sorted(split.filenames), split.shard_lengths, strict=True):
                source = folder / name
                target = folder / name.replace(".tfrecord-", f".{ARRAY_RECORD.file_suffix}-")
                adapter.write_examples(target, enumerate(read_tfrecord(source)))
                written = adapter.num_examples(target) if count else 0
                if written != count:
                    raise InputError(
                        f"{source}: holds {written:,} examples, {count:,} are expected. Prepare or"
                        " copy the set again."
                    )
        info_path = folder / "dataset_info.json"
        info = json.loads(info_path.read_text())
        info["alternativeFileFormats"] = [ARRAY_RECORD.value]
        partial = info_path.with_suffix(".partial")
        partial.write_text(json.dumps(info, indent=2))
        os.replace(partial, info_path)
    except OSError as error:
        raise InputError(
            f"data.data_dir={str(builder.data_dir_root)!r}: cannot convert {folder}: {error}."
        ) from error
