"""The interface of places that hold checkpoints, and the functions that turn a path or URL into a place.

File names have the form `FOLDER/FILE`, or `FILE` for a file of the place itself. There are no deeper folders. All
methods raise CheckpointError with one sentence. Several threads may read and list at once.
"""

from __future__ import annotations

from typing import Protocol

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import place_in_time
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.remote import RemotePlace


class Sink(Protocol):
    """A file that one thread writes. Readers do not see it before `commit`."""

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`. The caller may change `data` afterwards."""

    def sync(self) -> None:
        """Force all bytes to the medium, as far as the medium supports that before `commit`."""

    def commit(self) -> None:
        """Force all bytes to the medium, then give the file its name. Raises TakenError if the name is in use."""

    def discard(self) -> None:
        """Remove the file. Does nothing after `commit`."""


class Source(Protocol):
    """A file that is open for reading, from any thread."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole file."""

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        """Fill `view` from an offset. Raises DamagedError if the file is too short."""

    def close(self) -> None:
        """Close the file."""


class FileHold(Protocol):
    """A lock of this process on a file. The kernel releases it when the process ends."""

    @property
    def keeps_others_out(self) -> bool:
        """True if the medium supports locks."""

    def release(self) -> None:
        """Release the lock."""


class ReadablePlace(Protocol):
    """A place whose folders and files can be read."""

    @property
    def location(self) -> str:
        """The path or URL of the place, as users write it."""

    def open(self, name: str) -> Source:
        """Open a file for reading. Raises CheckpointError if it is missing."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names of files and folders in `folder`, sorted. The list is empty if `folder` does not exist.

        Names of unfinished files begin with a dot.
        """


class CheckpointPlace(ReadablePlace, Protocol):
    """A place that can be read and written."""

    def exists(self) -> bool:
        """Return True if the folder exists. In a store without folders: if it contains anything."""

    def create(self, name: str) -> Sink:
        """Begin a new file, and make its folder if needed."""

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder permanently. Does nothing if it is missing."""

    def hold(self, name: str, *, alone: bool) -> FileHold:
        """Lock a file until the lock is released, with `alone` exclusively, else shared.

        Raises TakenError if locks of other processes exclude it. A medium without locks, such as a remote store, always
        grants it.
        """


def place_at(location: str) -> CheckpointPlace:
    """Return the place that a path or URL names. It is neither checked nor created.

    Raises CheckpointError if `location` is empty or is a URL that cannot be used.
    """
    # An empty path would mean the working directory. More likely, the user forgot to set a shell variable.
    if not location:
        raise CheckpointError("a checkpoint's place is empty: name a folder or a URL")
    return RemotePlace(location) if "://" in location else LocalPlace(location)


def checkpoint_at(location: str) -> tuple[CheckpointPlace, str | None]:
    """Return the place, and the checkpoint's name if `location` is the folder of a checkpoint (else None).

    Raises CheckpointError as `place_at` does.
    """
    parent, _, name = location.rstrip("/").rpartition("/")
    if place_in_time(name) is None:
        return place_at(location), None
    return place_at(parent or "."), name
