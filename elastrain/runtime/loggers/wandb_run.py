"""A logger that writes to a run of Weights & Biases."""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastrain.base.processes import say
from elastrain.errors import ConfigError
from elastrain.job.log_book import Line
from elastrain.runtime.loggers.libraries import check_installed

FLUSH_S = 0.1
"""Time until wandb's own process has put a line into its file. Its default is 15 s."""
INIT_TIMEOUT_S = 30.0
ROOM_BYTES = 1 << 20
"""Free space that has to be left. wandb's own process writes later, and loses lines on a full disk without a word."""
_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")
_MODES = ("online", "offline", "disabled")


class Wandb:
    """A run of Weights & Biases with one id for the whole job. It needs the package `wandb`.

    Offline, each member that writes begins a folder of its own under the same id; `wandb sync` brings them together in
    the order of their names. If the server is away, the lines go to such a folder.

    Args:
        project: Name of the project.
        mode: "online", "offline" or "disabled", as in `wandb.init`. Default: the variable WANDB_MODE, or "online".
        dir: Folder in which wandb makes its folder `wandb`. Members on several nodes need to reach the same one.
        options: Other arguments of `wandb.init`, such as `name`, `entity`, `group`, `tags` and `config`.
    """

    def __init__(
        self,
        project: str,
        *,
        mode: str | None = None,
        dir: str | os.PathLike[str] = ".",  # noqa: A002 - wandb's own name
        **options: Any,
    ) -> None:
        check_installed("Wandb", "wandb")
        mode = mode or os.environ.get("WANDB_MODE") or "online"
        if mode not in _MODES:
            raise ConfigError(f"elastrain.Wandb(mode=…), or WANDB_MODE, takes one of {', '.join(_MODES)}; got {mode!r}")
        taken = sorted({"id", "resume", "settings", "reinit"} & options.keys())
        if taken:
            raise ConfigError(f"elastrain.Wandb(…) chooses {' and '.join(taken)} itself: leave it out")
        self._project, self._mode, self._options = project, mode, options
        self._folder = Path(dir).absolute()
        self._id = ""
        self._run: Any = None

    def __str__(self) -> str:
        return f"wandb project {self._project}"

    def begin(self, run: str) -> int:
        """Open the run, and return the newest step that is in it; see `Logger`."""
        self._check_room()
        if self._run is not None:
            self._run.finish()
        self._id = re.sub(r"[^\w.-]", "_", run)[-64:]
        self._run = self._opened(self._mode)
        if self._mode == "online" and not self._run.offline:
            return int(self._run.starting_step) - 1
        # Behind the start of the run: by now a lost writer's wandb process has ended.
        return max([step for path in self._files() for step, _ in _rows(path.read_bytes())], default=-1)

    def cut(self, step: int) -> None:
        """Remove later steps from the files of this run. A server ignores steps that it has."""
        for path in self._files():
            ends = [start for found, start in _rows(path.read_bytes()) if found > step]
            if ends:
                os.truncate(path, min(ends))

    def write(self, lines: Sequence[Line]) -> None:
        """Log lines. The values of one step are one row, which is complete when the next step is logged."""
        self._check_room()
        for line in lines:
            self._run.log(dict(line.values), step=line.step)

    def _check_room(self) -> None:
        """Make the folder. Raises OSError if its disk is full."""
        if self._mode != "disabled":
            self._folder.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(self._folder).free
            if free_bytes < ROOM_BYTES:
                raise OSError(errno.ENOSPC, f"{free_bytes} bytes are free in {self._folder}, less than {ROOM_BYTES}")

    def _opened(self, mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            silent=True, init_timeout=INIT_TIMEOUT_S, console="off", x_transaction_log_flush_interval=FLUSH_S
        )
        asked: dict[str, Any] = {"project": self._project, "id": self._id, "dir": str(self._folder), "mode": mode}
        try:
            return wandb.init(**asked, resume="allow", settings=settings, **self._options)
        except wandb.errors.Error as error:
            if mode != "online":
                raise
            say(f"{self}: the server is away ({error}); `wandb sync` sends what is in {self._folder}/wandb later")
            return self._opened("offline")

    def _files(self) -> list[Path]:
        """Return the files of earlier writers, without the one that is being written."""
        mine = Path(self._run.settings.sync_file) if self._run is not None else None
        found = sorted(self._folder.glob(f"wandb/offline-run-*-{self._id}/run-{self._id}.wandb"))
        return [path for path in found if path != mine]


def _rows(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield step and first byte of each row of a .wandb file, up to a record that is torn."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    for start, payload in _records(data):
        record = messages.Record.FromString(payload)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num, start


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield first byte and content of each record. The format is LevelDB's log, behind seven bytes of wandb's own."""
    at, whole, start = _HEADER.size, b"", _HEADER.size
    while at + _HEADER.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEADER.size:  # too little room for a header: the rest of the block is empty
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        if not kind or at + _HEADER.size + size > len(data):
            return
        if kind in (1, 2):  # a whole record, or the first part of one
            whole, start = b"", at
        whole += data[at + _HEADER.size : at + _HEADER.size + size]
        at += _HEADER.size + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield start, whole
