"""A place in a remote store, or in any file system that `fsspec` supports: `s3://…`, `memory://…` (extra `remote`).

A file in such a store becomes visible when it is closed, and is then complete. There are no syncs and no locks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, told
from elastrain.snapshot.durable.places.local import TEMPORARY

_WORDS_MAX = 300


class RemotePlace:
    """A `port.CheckpointPlace` at a URL.

    Raises CheckpointError if the library of the store, or fsspec itself, is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            self._files, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            needs = (
                "fsspec: pip install 'elastrain[remote]'"
                if error.name == "fsspec"
                else f"the library of its store: {error}"
            )
            raise CheckpointError(f"{url} needs {needs}") from None
        except ValueError as error:
            raise CheckpointError(f"{url} names no place: {error}") from None
        except Exception as error:  # raised by the store's library, which may already contact its server here
            raise CheckpointError(f"{url} cannot be used: {_words(error)}") from error
        self._url = url

    @property
    def location(self) -> str:
        """The URL of the place."""
        return self._url

    def create(self, name: str) -> _RemoteSink:
        """Begin a new file. See `port.CheckpointPlace.create`."""
        path = self._path(name)
        with _asked(f"writing {path}"):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        return _RemoteSink(self._files, path)

    def open(self, name: str) -> _RemoteSource:
        """Open a file for reading. See `port.ReadablePlace.open`."""
        return _RemoteSource(self._files, self._path(name))

    def exists(self) -> bool:
        """Return True if the folder exists, or, in a store without folders, if it contains anything."""
        with _asked(f"looking into {self._url}"):
            self._files.invalidate_cache()
            return bool(self._files.isdir(self._root))

    def names(self, folder: str = "") -> list[str]:
        """Return the sorted names in `folder`; empty if it does not exist."""
        path = self._path(folder)
        with _asked(f"looking into {path}"):
            try:
                self._files.invalidate_cache()
                found = self._files.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(name for each in found if (name := str(each).rstrip("/").rpartition("/")[2]))

    def remove(self, name: str) -> None:
        """Remove a file or an empty folder permanently. Does nothing if it is missing."""
        path = self._path(name)
        with _asked(f"removing {path}"):
            try:
                if self._files.isdir(path):
                    self._files.rmdir(path)
                else:
                    self._files.rm_file(path)
            except FileNotFoundError:
                pass

    def hold(self, name: str, *, alone: bool) -> _NoHold:
        """Return a lock that excludes nothing, because the store has no locks."""
        return _NoHold()

    def _path(self, name: str) -> str:
        return f"{str(self._root).rstrip('/')}/{name}" if name else str(self._root)


@contextmanager
def _asked(doing: str) -> Iterator[None]:
    """Turn any error of a store's library into a CheckpointError, as `told` does for OSError."""
    try:
        with told(doing):
            yield
    except CheckpointError:
        raise
    except Exception as error:  # each store's library has its own errors, without a common base class
        raise CheckpointError(f"{doing} failed: {_words(error)}") from error


def _words(error: Exception) -> str:
    """Return the text and class of an error on one line, shortened."""
    return f"{' '.join(str(error).split())[:_WORDS_MAX]} ({type(error).__name__})".strip()


class _NoHold:
    """A lock that excludes nothing."""

    keeps_others_out = False

    def release(self) -> None:
        pass


class _RemoteSink:
    """A file that is uploaded in the store's own chunks as it is written. `commit` makes it visible."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        self._temporary = ""
        self._size_bytes = 0
        with _asked(f"writing {path}"):
            self._refuse_what_is_there()
            self._file: Any = files.open(path, "wb", autocommit=False)
            if files.exists(path):
                # This store shows files while they are written: use a temporary name until the file is complete.
                self._file.close()
                files.rm_file(path)
                folder, _, name = path.rpartition("/")
                self._temporary = f"{folder}/{TEMPORARY}{name}-{secrets.token_hex(4)}"
                self._file = files.open(self._temporary, "wb")

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def write(self, data: memoryview) -> None:
        with _asked(f"writing {self._path}"):
            self._file.write(data)
        self._size_bytes += data.nbytes

    def sync(self) -> None:
        with _asked(f"writing {self._path}"):
            self._file.flush()

    def commit(self) -> None:
        with _asked(f"writing {self._path}"):
            self._refuse_what_is_there()
            self._file.close()
            if self._temporary:
                self._files.mv(self._temporary, self._path)
            else:
                self._file.commit()
        self._file = None

    def discard(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        with _asked(f"removing {self._path}"):
            file.close()
            if self._temporary:
                self._files.rm_file(self._temporary)
            else:
                file.discard()

    def _refuse_what_is_there(self) -> None:
        if self._files.exists(self._path):
            raise FileExistsError(self._path)


class _RemoteSource:
    """A file of the store that is open for reading."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        with _asked(f"reading {path}"):
            self._size_bytes = int(files.size(path) or 0)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        with _asked(f"reading {self._path}"):
            data = self._files.cat_file(self._path, start=offset_bytes, end=offset_bytes + view.nbytes)
        if len(data) != view.nbytes:
            raise DamagedError(f"{self._path} is cut short: it has {self._size_bytes:,} bytes, and more belong to it")
        view[:] = data

    def close(self) -> None:
        pass
