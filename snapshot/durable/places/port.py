"""The port of places. Names are `FOLDER/FILE` or, for a file of the place itself, `FILE`; nothing lies deeper.

Everything raises CheckpointError with one sentence; what reads and lists is safe for several threads.

From what a user names to a place: `--checkpoint-dir`.
"""

from __future__ import annotations

from typing import Protocol

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import place_in_time
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.remote import RemotePlace


class Sink(Protocol):
    """A file that is being written, for one thread. Nobody sees it before `commit`."""

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""

    def write(self, data: memoryview) -> None:
        """Append all of it. `data` may be changed afterwards."""

    def sync(self) -> None:
        """All bytes are on the medium, as far as it can say so before `commit`."""

    def commit(self) -> None:
        """Let it be seen under its name, once all bytes are on the medium. Raises TakenError if the name is taken."""

    def discard(self) -> None:
        """Leave nothing of it behind. Nothing happens after `commit`."""


class Source(Protocol):
    """A file that is read, by any thread."""

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        """Fill `view`. Raises DamagedError where the file is too short."""

    def close(self) -> None:
        """Give back what it holds."""


class FileHold(Protocol):
    """A file that this process holds; the kernel lets it go when the process ends."""

    @property
    def keeps_others_out(self) -> bool:
        """False on a medium without locks."""

    def release(self) -> None:
        """Let it go."""


class ReadablePlace(Protocol):
    """A folder of folders of files that can be read, on whatever medium."""

    @property
    def location(self) -> str:
        """As users name it: a path or a URL."""

    def open(self, name: str) -> Source:
        """Raises CheckpointError where it is missing."""

    def names(self, folder: str = "") -> list[str]:
        """Files and folders in it, sorted; empty for one that is not there. Unfinished files have a leading dot."""


class CheckpointPlace(ReadablePlace, Protocol):
    """One that can be written, too."""

    def exists(self) -> bool:
        """Whether the folder is there; of a store without folders, whether anything lies in it."""

    def create(self, name: str) -> Sink:
        """Begin a new file; its folder is made."""

    def remove(self, name: str) -> None:
        """Remove a file for good, or an empty folder. Nothing happens where it is missing."""

    def hold(self, name: str, *, alone: bool) -> FileHold:
        """FileHold a file, shared or alone, until released. Raises TakenError while others' holds exclude it.

        A medium without locks, such as a remote store, always grants it.
        """


def place_at(location: str) -> CheckpointPlace:
    """The place that a path or URL names; nothing is looked at or made. Raises CheckpointError for a URL of nowhere."""
    # As a path it would be the working directory, which nobody means who has forgotten to set a variable.
    if not location:
        raise CheckpointError("a checkpoint's place is empty: name a folder or a URL")
    return RemotePlace(location) if "://" in location else LocalPlace(location)


def checkpoint_at(location: str) -> tuple[CheckpointPlace, str | None]:
    """The place, and the checkpoint's name where the path is that of its folder. Raises CheckpointError."""
    parent, _, name = location.rstrip("/").rpartition("/")
    if place_in_time(name) is None:
        return place_at(location), None
    return place_at(parent or "."), name
