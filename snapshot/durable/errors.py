"""The errors of durable checkpoints. Each text is one sentence for users: what happened, to which file, what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(Exception):
    """Base class: a checkpoint cannot be written or read. Complete checkpoints remain as they were."""


class DamagedError(CheckpointError):
    """The bytes read differ from the bytes written. The text names the file, the frame and the shard."""


class OtherFormatError(CheckpointError):
    """The checkpoint has the format of another version of elastrain, which can read it.

    It is not damaged. Using an older checkpoint instead would lose steps.
    """


class TakenError(CheckpointError):
    """The place belongs to another job, or the name is already in use. Nothing was changed."""


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
    """Turn an OSError into a CheckpointError. `doing` begins its sentence, for example `writing /x/y`."""
    try:
        yield
    except FileExistsError as error:
        raise TakenError(f"{doing} failed: it is there already, and nothing is overwritten") from error
    except FileNotFoundError as error:  # some libraries set no errno
        raise CheckpointError(f"{doing} failed: it does not exist") from error
    except OSError as error:
        raise CheckpointError(f"{doing} failed: {_ADVICE.get(error.errno or 0, error.strerror or error)}") from error
