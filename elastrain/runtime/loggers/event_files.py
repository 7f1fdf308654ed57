"""A logger that writes event files for TensorBoard."""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastrain.errors import ConfigError
from elastrain.job.log_book import Line
from elastrain.runtime.loggers.libraries import check_installed

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")


class TensorBoard:
    """A folder of event files: numbers become scalars, words become texts. It needs the package `tensorboard`.

    Each member that writes begins a file of its own. It tells readers from which step on its values replace those of
    the files before it, as `SummaryWriter(purge_step=…)` does. So readers such as TensorBoard and `EventAccumulator`
    see each step once, also after a resume from an earlier checkpoint.

    Args:
        log_dir: The folder, one for each run. Members on several nodes need to reach the same folder.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        check_installed("TensorBoard", "tensorboard")
        if not isinstance(log_dir, str | os.PathLike) or not os.fspath(log_dir):
            raise ConfigError(f"elastrain.TensorBoard(log_dir) takes the name of a folder; got {log_dir!r}")
        self._folder = Path(log_dir).absolute()
        self._run = ""
        self._file: io.FileIO | None = None

    def __str__(self) -> str:
        return str(self._folder)

    def begin(self, run: str) -> int:
        """Return the newest step in this run's event files; see `Logger`."""
        if self._file is not None:
            self._file.close()
        self._run = re.sub(r"[^\w-]", "_", run)
        self._folder.mkdir(parents=True, exist_ok=True)
        for _, path in reversed(self._files()):
            if path.name.endswith(f".{self._run}"):
                steps = [event.step for event in _events(path) if event.HasField("summary")]
                if steps:
                    return int(max(steps))
        return -1

    def cut(self, step: int) -> None:
        """Begin a file that replaces all later steps of the files before it."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # Readers take the files in the order of their names. A clock that is behind must not change the order.
        stamp = max([int(time.time()), *[number + 1 for number, _ in self._files()]])
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{self._run}"
        self._file = io.FileIO(self._folder / name, "x")
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, lines: Sequence[Line]) -> None:
        """Append the values of lines."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        for line in lines:
            values = []
            for name, value in line.values.items():
                if isinstance(value, str):
                    values += text_pb(name, value).value
                elif value is not None:
                    values.append(Summary.Value(tag=name, simple_value=float(value)))
            self._append(Event(wall_time=time.time(), step=line.step, summary=Summary(value=values)))

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        framed = io.BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        assert self._file is not None
        if self._file.write(framed.getvalue()) != framed.tell():
            raise OSError("the disk is full")

    def _files(self) -> list[tuple[int, Path]]:
        found = [(_NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match)


def _events(path: Path) -> Iterator[Any]:
    """Yield the events of a file, up to one that is torn."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    yield from LegacyEventFileLoader(str(path)).Load()
