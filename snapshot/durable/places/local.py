"""A place in a local or shared file system. Files get a temporary name, are synced, and then get their real name.

All system calls go through `SystemFiles`, so that tests can interrupt them at any point.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError, told

TEMPORARY = ".writing-"
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.EROFS}
_PAGE_BYTES = 4096
_WRITE_BYTES = 8 << 20


class SystemFiles:
    """The system calls that a local place makes. All raise OSError."""

    def create(self, path: str) -> int:
        """Create a new file for writing. Returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def open(self, path: str) -> int:
        """Open a file for reading. Returns its descriptor."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_direct(self, path: str) -> int:
        """Open a file for reads of whole pages that bypass the kernel's cache. Returns its descriptor.

        Such reads return the bytes that are really on the drive.
        """
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def open_to_lock(self, path: str) -> int:
        """Open a file for locking. Returns its descriptor.

        On NFS, a shared lock needs a readable descriptor, and an exclusive lock a writable one.
        """
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, fd: int, data: memoryview) -> int:
        """Write bytes. Returns the number of bytes written, which may be smaller than asked."""
        return os.write(fd, data)

    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        """Read from an offset into `view`. Returns the number of bytes read; 0 at the end of the file."""
        return os.preadv(fd, [view], offset)

    def size(self, fd: int) -> int:
        """Return the size of a file in bytes."""
        return os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        """Force a file to the medium."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def name_new(self, old: str, new: str) -> None:
        """Rename a file. Raises FileExistsError if the new name is in use."""
        try:
            os.link(old, new)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from None
            os.rename(old, new)
            return
        os.unlink(old)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents. Does nothing if it exists."""
        os.makedirs(path, mode=0o700, exist_ok=True)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, in any order."""
        return os.listdir(path)

    def sync_folder(self, path: str) -> None:
        """Force the entries of a folder to the medium, where the file system supports that."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(fd)

    def lock(self, fd: int, *, alone: bool) -> None:
        """Lock a file without waiting: with `alone` exclusively, else shared."""
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)


class LocalPlace:
    """A `port.CheckpointPlace` in a folder. The folder is made together with its first file."""

    def __init__(self, path: str | os.PathLike[str], files: SystemFiles | None = None) -> None:
        self._root = str(path) if files else str(Path(path).absolute())
        self._files = files or SystemFiles()
        self._is_made = False

    @property
    def location(self) -> str:
        """The absolute path of the folder."""
        return self._root

    def create(self, name: str) -> _LocalSink:
        """Begin a new file under a temporary name. See `port.CheckpointPlace.create`."""
        path = self._path(name)
        folder, _, _ = path.rpartition("/")
        with told(f"writing {path}"):
            self._make_root()
            if folder != self._root:
                self._files.make_folder(folder)
                self._files.sync_folder(self._root)
            return _LocalSink(self._files, path)

    def open(self, name: str) -> _LocalSource:
        """Open a file for reading. See `port.ReadablePlace.open`."""
        return _LocalSource(self._files, self._path(name))

    def exists(self) -> bool:
        """Return True if the folder exists."""
        with told(f"looking into {self._root}"):
            try:
                self._files.names(self._root)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in `folder`; empty if it does not exist."""
        path = self._path(folder)
        with told(f"looking into {path}"):
            try:
                return sorted(self._files.names(path))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder permanently. Does nothing if it is missing."""
        path = self._path(name)
        with told(f"removing {path}"):
            try:
                self._remove(path)
                self._files.sync_folder(path.rpartition("/")[0])
            except FileNotFoundError:
                pass

    def hold(self, name: str, *, alone: bool) -> LocalHold:
        """Lock a file. See `port.CheckpointPlace.hold`."""
        path = self._path(name)
        with told(f"opening {path}"):
            fd = self._files.open_to_lock(path)
        try:
            with told(f"locking {path}"):
                self._files.lock(fd, alone=alone)
        except CheckpointError as error:
            self._files.close(fd)
            if isinstance(error.__cause__, BlockingIOError):
                raise TakenError(f"{path} is held by another process") from error
            raise
        return LocalHold(self._files, fd)

    def _make_root(self) -> None:
        """Make the root folder, and sync the entries of all folders above it.

        After a power cut, an entry that was not synced may be gone, and all checkpoints with it.
        """
        if self._is_made:
            return
        with told(f"making the folder {self._root}"):
            try:
                self._files.make_folder(self._root)
            except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
                raise CheckpointError(f"{_obstacle(self._root)}: name another directory") from error
        # Sync all of them: the process that made them may have been killed before it synced them.
        above = self._root
        while above != "/":
            above = above.rpartition("/")[0] or "/"
            with suppress(PermissionError):  # it belongs to another user, who made it
                self._files.sync_folder(above)
        self._is_made = True

    def _remove(self, path: str) -> None:
        try:
            self._files.remove(path)
        except (IsADirectoryError, PermissionError):  # POSIX lets unlink() of a folder fail with either
            self._files.remove_folder(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _obstacle(path: str) -> str:
    """Return a clause that says why no folder can be made at this path."""
    there = next(each for each in (path, *map(str, Path(path).parents)) if os.path.lexists(each))
    if os.path.isdir(there):  # on a file system of the kernel's own, such as /proc
        return f"no folder can be made in {there}"
    return f"{there} is {'no folder' if os.path.exists(there) else 'a symbolic link to nowhere'}"


class LocalHold:
    """An open file descriptor with a lock on it."""

    keeps_others_out = True

    def __init__(self, files: SystemFiles, fd: int) -> None:
        self._files, self._fd = files, fd

    def release(self) -> None:
        """Close the descriptor, which releases the lock."""
        self._files.close(self._fd)


class _LocalSink:
    """A file with a temporary name beside its final one. It is locked from its creation until it has the final name."""

    def __init__(self, files: SystemFiles, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self._files, self._path, self._folder = files, path, folder
        self._temporary = f"{folder}/{TEMPORARY}{name}-{secrets.token_hex(4)}"
        self._fd: int | None = files.create(self._temporary)
        with suppress(OSError):  # on a medium without locks, no process removes abandoned files
            files.lock(self._fd, alone=True)
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def write(self, data: memoryview) -> None:
        assert self._fd is not None
        rest = data.cast("B") if data.nbytes else data
        with told(f"writing {self._path}"):
            while rest.nbytes:
                done = self._files.write(self._fd, rest[:_WRITE_BYTES])
                rest = rest[done:]
                self._size_bytes += done

    def sync(self) -> None:
        assert self._fd is not None
        with told(f"writing {self._path}"):
            self._files.sync(self._fd)

    def commit(self) -> None:
        self.sync()
        with told(f"writing {self._path}"):
            self._files.name_new(self._temporary, self._path)
            self._close()
            self._files.sync_folder(self._folder)

    def discard(self) -> None:
        self._close()
        with suppress(OSError):  # the disk is full or gone; the file that remains has a temporary name
            self._files.remove(self._temporary)

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            self._files.close(fd)


class _LocalSource:
    """A file that is open for reading.

    Whole pages are read past the kernel's cache if the file system supports that. Other reads go through the cache.
    """

    def __init__(self, files: SystemFiles, path: str) -> None:
        self._files, self._path = files, path
        with told(f"reading {path}"):
            self._fd = files.open(path)
            self._size_bytes = files.size(self._fd)
        self._direct_fd: int | None = None
        with suppress(OSError):  # not supported, for example by a file system in memory
            self._direct_fd = files.open_direct(path)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        done = 0
        with told(f"reading {self._path}"):
            while done < view.nbytes:
                got = self._read(view[done:], offset_bytes + done)
                if not got:
                    raise DamagedError(
                        f"{self._path} is cut short: it has {self._size_bytes:,} bytes, and more belong to it"
                    )
                done += got

    def close(self) -> None:
        self._files.close(self._fd)
        if self._direct_fd is not None:
            self._files.close(self._direct_fd)

    def _read(self, view: memoryview, offset_bytes: int) -> int:
        if self._direct_fd is not None and _is_paged(view, offset_bytes):
            try:
                return self._files.read_into(self._direct_fd, view, offset_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return self._files.read_into(self._fd, view, offset_bytes)


def _is_paged(view: memoryview, offset_bytes: int) -> bool:
    """Return True if memory address, offset and length are whole pages, as reads past the cache require."""
    if (view.nbytes | offset_bytes) % _PAGE_BYTES or not view.nbytes:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % _PAGE_BYTES == 0
