"""A logger that appends JSON lines to one file."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from elastrain.base.processes import say
from elastrain.errors import ConfigError
from elastrain.job.log_book import Line

_SYNC_EVERY_S = 1.0
_BEGIN = b'{"step":'


class Jsonl:
    """A file with one JSON object for each call of `job.log`: `step`, `run`, and the values. NaN becomes null.

    A killed process loses no line that it wrote, and a crash of the machine those of the last second. If the file has
    lines of another run, they are moved aside to `<name>.1.jsonl`, `<name>.2.jsonl`, …. If the job resumes from a
    checkpoint, the lines of later steps are removed, because these steps are computed again.

    Args:
        path: Name of the file. Folders are made. Members on several nodes need to reach the same file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"elastrain.Jsonl(path) takes the name of a file; got {path!r}")
        self._path = Path(path).absolute()
        if self._path.is_dir():
            raise ConfigError(f"elastrain.Jsonl(path) takes the name of a file; {path} is a folder")
        self._fd = -1
        self._size_bytes = 0
        """Size of the file after the last write of this process."""
        self._run = ""
        self._synced_s = 0.0

    def __str__(self) -> str:
        return str(self._path)

    def begin(self, run: str) -> int:
        """Open the file, remove a last line that has no end, and return the step of the line before; see `Logger`."""
        self._close()
        self._run = run
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._set_aside()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        whole = next((end for _, end, _ in self._backward()), 0)
        os.ftruncate(self._fd, whole)
        self._size_bytes = whole
        return next((step for *_, step in self._backward() if step is not None), -1)

    def cut(self, step: int) -> None:
        """Remove all lines of later steps."""
        end = next((end for _, end, found in self._backward() if found is not None and found <= step), 0)
        os.ftruncate(self._fd, end)
        self._size_bytes = end

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines. Raises OSError if another process has written since."""
        if os.fstat(self._fd).st_size != self._size_bytes:
            raise OSError("another process has written to the file")
        text = b"".join(
            msgspec.json.encode({"step": line.step, "run": self._run, **line.values}) + b"\n" for line in lines
        )
        while text:
            count = os.write(self._fd, text)
            text = text[count:]
            self._size_bytes += count
        if time.monotonic() - self._synced_s > _SYNC_EVERY_S:
            os.fsync(self._fd)
            self._synced_s = time.monotonic()

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _set_aside(self) -> None:
        """Rename the file if its first line is of another run, or no line of a logger at all."""
        try:
            with self._path.open("rb") as file:
                first = file.readline()
        except FileNotFoundError:
            return
        is_torn = not first.endswith(b"\n") and _BEGIN.startswith(first[: len(_BEGIN)])
        if is_torn or _field(first, "run") == self._run:
            return
        number, stem, suffix = 1, self._path.stem, self._path.suffix
        while (aside := self._path.with_name(f"{stem}.{number}{suffix}")).exists():
            number += 1
        self._path.rename(aside)
        say(f"{self._path.name} had lines of another run: they are in {aside} now")

    def _backward(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield start, end and step of each whole line, the last one first. The step of a line of others is None."""
        size = os.fstat(self._fd).st_size
        if not size:
            return
        with mmap.mmap(self._fd, size, prot=mmap.PROT_READ) as data:
            end = data.rfind(b"\n") + 1
            while end > 0:
                start = data.rfind(b"\n", 0, end - 1) + 1
                step = _field(data[start:end], "step")
                yield start, end, step if isinstance(step, int) else None
                end = start


def _field(line: bytes, name: str) -> object:
    with suppress(ValueError):
        found = msgspec.json.decode(line)
        return found.get(name) if isinstance(found, dict) else None
    return None
