"""TensorBoard's event files, written as one goes.

tensorboardX's own writer has a thread, which ends at a full disk, and then its queue holds up the
run for good.
"""

import socket
import struct
import time
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """One file of scalars.

    Args:
      folder: made if it is missing.
      purge_step: from this step on TensorBoard forgets what earlier files in the folder say; None
        where there are none.

    Raises:
      OSError: as the methods do, if it cannot be written.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._file = (folder / name).open("ab")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=restart))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one scalar per name."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        """Frames an event as TFRecord does: length, its checksum, content, its checksum."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
        self._file.write(length + checksums[0] + content + checksums[1])
        self._file.flush()
