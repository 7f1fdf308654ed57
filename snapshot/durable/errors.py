"""The errors of the durable tier, each one sentence for a user: what happened, to which file, what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(Exception):
    """A checkpoint cannot be written, or another one has to be read. Nothing that was complete before is touched."""


class DamagedError(CheckpointError):
    """What was read differs from what was written: file, frame and shard are named."""


class OtherFormatError(CheckpointError):
    """Another version of elastrain has written it, and reads it: an older one in its place would lose steps."""


class TakenError(CheckpointError):
    """The place belongs to another job, or the name is taken: nothing was changed."""


_ADVICE = {
    errno.ENOSPC: "there is no room: free some, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: free some room, or keep fewer checkpoints",
    errno.EACCES: "there is no permission: change the rights, or name another directory",
    errno.EPERM: "there is no permission: change the rights, or name another directory",
    errno.EROFS: "the file system is read-only: name another directory",
    errno.ENOTDIR: "a part of the path is no folder: name another directory",
    errno.EISDIR: "it is a folder, where a file is expected",
    errno.EIO: "the device reports an error: look at that drive",
}


@contextmanager
def told(doing: str) -> Iterator[None]:
    """Turns an OSError into a CheckpointError. `doing` is a sentence's begin, such as `writing /x/y`."""
    try:
        yield
    except FileExistsError as error:
        raise TakenError(f"{doing} failed: it is there already, and nothing is overwritten") from error
    except FileNotFoundError as error:  # not every library says so by its number
        raise CheckpointError(f"{doing} failed: it does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{doing} failed: {_ADVICE.get(error.errno or 0, error.strerror or error)}") from error
