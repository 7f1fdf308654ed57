"""A file system in memory that loses what was not synced: the system calls of a local place, cut short at any of them.

After `crash()` every file has the bytes of its last sync, then a random part of what was written since, torn anywhere;
every folder has the entries of its last sync, and of those changed since each with a chance of one half.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field

from elastrain.snapshot.durable.places.local import SystemFiles


class PowerCutError(BaseException):
    """The machine has gone: no handler of a program sees this."""


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    locks: dict[int, bool] = field(default_factory=dict)
    """Descriptor -> alone."""


@dataclass
class _Folder:
    """Path -> what is there; `synced` is what would be there after a power cut."""

    now: dict[str, object] = field(default_factory=dict)
    synced: dict[str, object] = field(default_factory=dict)


class CrashingFiles(SystemFiles):
    """`calls_left`: system calls until the power is cut; None for never.

    `faults`: OSErrors by number of the call that they are raised at.
    """

    def __init__(self, seed: int = 0) -> None:
        self.calls_left: int | None = None
        self.calls = 0
        self.faults: dict[int, int] = {}
        self._chance = random.Random(seed)
        self._root = _Folder()
        self._open: dict[int, tuple[_File, int]] = {}
        self._next = 3

    def crash(self) -> None:
        """The power comes back: what was not synced is lost, or not."""
        self.calls_left = None
        self._open.clear()
        self._forget(self._root)

    def damage(self, path: str) -> None:
        """Flip one bit of a file."""
        file = self._file(path)
        position = self._chance.randrange(len(file.data))
        file.data[position] ^= 1 << self._chance.randrange(8)
        file.synced = bytes(file.data)

    def _forget(self, folder: _Folder) -> None:
        for name in {*folder.now, *folder.synced}:
            before, after = folder.synced.get(name), folder.now.get(name)
            kept = before if before is not after and self._chance.random() < 0.5 else after
            if kept is None:
                folder.now.pop(name, None)
            else:
                folder.now[name] = kept
        folder.synced = dict(folder.now)
        for entry in folder.now.values():
            if isinstance(entry, _Folder):
                self._forget(entry)
            elif isinstance(entry, _File):
                self._tear(entry)

    def _tear(self, file: _File) -> None:
        file.locks.clear()
        if bytes(file.data) == file.synced:
            return
        kept = self._chance.randint(0, len(file.data))
        torn = bytearray(file.synced[: len(file.data)].ljust(len(file.data), b"\0"))
        torn[:kept] = file.data[:kept]
        file.data = torn[: self._chance.randint(kept, len(torn))]
        file.synced = bytes(file.data)

    def _called(self) -> None:
        self.calls += 1
        if self.calls_left is not None:
            if self.calls_left <= 0:
                raise PowerCutError
            self.calls_left -= 1
        if self.calls in self.faults:
            raise OSError(self.faults[self.calls], "injected")

    def _folder(self, path: str) -> _Folder:
        folder = self._root
        for name in path.strip("/").split("/"):
            if name:
                found = folder.now.get(name)
                if found is None:
                    raise FileNotFoundError(errno.ENOENT, "no such folder", path)
                if not isinstance(found, _Folder):
                    raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
                folder = found
        return folder

    def _split(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def _file(self, path: str) -> _File:
        folder, name = self._split(path)
        found = folder.now.get(name)
        if not isinstance(found, _File):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return found

    def _opened(self, file: _File) -> int:
        self._next += 1
        self._open[self._next] = (file, 0)
        return self._next

    def create(self, path: str) -> int:
        self._called()
        folder, name = self._split(path)
        if name in folder.now:
            raise FileExistsError(errno.EEXIST, "is there", path)
        file = folder.now[name] = _File()
        return self._opened(file)

    def open(self, path: str) -> int:
        self._called()
        return self._opened(self._file(path))

    def open_to_lock(self, path: str) -> int:
        return self.open(path)

    def open_direct(self, path: str) -> int:
        raise OSError(errno.EINVAL, "not here", path)

    def write(self, fd: int, data: memoryview) -> int:
        """A cut in here leaves a part of it."""
        some = bytes(data[: self._chance.randint(1, data.nbytes)])
        file, _ = self._open[fd]
        try:
            self._called()
        except PowerCutError:
            file.data += some
            raise
        file.data += some
        return len(some)

    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        file, _ = self._open[fd]
        data = file.data[offset : offset + view.nbytes]
        view[: len(data)] = data
        return len(data)

    def size(self, fd: int) -> int:
        return len(self._open[fd][0].data)

    def sync(self, fd: int) -> None:
        self._called()
        file, _ = self._open[fd]
        file.synced = bytes(file.data)

    def close(self, fd: int) -> None:
        file, _ = self._open.pop(fd)
        file.locks.pop(fd, None)

    def name_new(self, old: str, new: str) -> None:
        """As the real one: a link, then the old name goes. A cut may come between."""
        self._called()
        there, name = self._split(new)
        if name in there.now:
            raise FileExistsError(errno.EEXIST, "is there", new)
        there.now[name] = self._file(old)
        self.remove(old)

    def remove(self, path: str) -> None:
        self._called()
        folder, name = self._split(path)
        if name not in folder.now:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if isinstance(folder.now[name], _Folder):
            raise IsADirectoryError(errno.EISDIR, "a folder", path)
        del folder.now[name]

    def remove_folder(self, path: str) -> None:
        self._called()
        folder, name = self._split(path)
        if self._folder(path).now:
            raise OSError(errno.ENOTEMPTY, "not empty", path)
        del folder.now[name]

    def make_folder(self, path: str) -> None:
        self._called()
        folder = self._root
        for name in path.strip("/").split("/"):
            found = folder.now.setdefault(name, _Folder())
            assert isinstance(found, _Folder)
            folder = found

    def names(self, path: str) -> list[str]:
        return list(self._folder(path).now)

    def sync_folder(self, path: str) -> None:
        self._called()
        folder = self._folder(path)
        folder.synced = dict(folder.now)

    def lock(self, fd: int, *, alone: bool) -> None:
        file, _ = self._open[fd]
        if any(alone or others for other, others in file.locks.items() if other != fd):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        file.locks[fd] = alone
