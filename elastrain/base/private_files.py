"""Files that only their user may read, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def create(path: Path) -> int:
    """A descriptor of a new file of mode 0600. Raises OSError, FileExistsError for a name that is taken (by a link)."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def replace(path: Path, data: bytes) -> None:
    """Whoever reads `path` finds what was there before, or all of `data`. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(create(fresh), "wb") as file:
            file.write(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
