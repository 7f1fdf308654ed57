"""Validation of sizes and paths that users give. Each error is one sentence. No torch."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path

from elastrain.offload.errors import OffloadConfigError


def whole_bytes(name: str, value: object) -> int:
    """Return `value` as an int. Raises OffloadConfigError if it is no integer; its range is not checked."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise OffloadConfigError(f"{name} must be a whole number of bytes, 8 << 30 say, got {value!r}")


def directories(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return one or several directories as absolute paths without symlinks.

    Raises OffloadConfigError if one is not a path, or if two names mean the same directory.
    """
    several = [given] if isinstance(given, str | os.PathLike) else given
    try:
        named = [os.fsdecode(each) for each in several]
    except TypeError:
        raise OffloadConfigError(f"dirs must be one directory or several, each a path, got {given!r}") from None
    seen = dict[str, str]()
    for each in named:
        if (before := seen.get(place := os.path.realpath(os.path.expanduser(each)))) is not None:
            raise OffloadConfigError(f"dirs must be several directories, {before} and {each} are one: name it once")
        seen[place] = each
    return tuple(seen)


def one_path(name: str, value: object) -> Path:
    """Return `value` as a `Path`. Raises OffloadConfigError if it is not a path."""
    try:
        return Path(os.fsdecode(value))  # type: ignore[arg-type]
    except TypeError:
        raise OffloadConfigError(f"{name} must be a path, got {value!r}") from None
