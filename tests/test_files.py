import contextlib
import os

import pytest
from conftest import small_files_only

from structinit_jax import files
from structinit_jax.errors import FullDiskError, InputError


def test_files_are_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    files.write_atomically(path, "old")
    umask = os.umask(0o022)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # others can read it
    with contextlib.suppress(OSError), small_files_only(2):
        files.write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_what_cannot_be_read_or_is_not_json_is_named(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(InputError, match=rf"{path} cannot be read"):
        files.read_json(path)
    for content in (b"", b"{", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"{path} is not JSON"):
            files.read_json(path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        ValueError("RESOURCE_EXHAUSTED: Error writing 'x': No space left on device; data loss"),
    ],
)
def test_a_full_disk_is_one_sentence(tmp_path, error):
    with pytest.raises(FullDiskError) as caught, files.report_full_disk(tmp_path):
        raise error
    assert caught.value.exit_code == 1
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(OSError, match="permitted"), files.report_full_disk(tmp_path):
        raise PermissionError("not permitted")
