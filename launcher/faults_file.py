"""A file of faults: a line each, as after `elastrain inject`."""

from __future__ import annotations

import shlex
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.launcher.faults import CLASSES, Fault, make_fault


def read_faults(path: Path) -> tuple[Fault, ...]:
    """One fault per line, as after `elastrain inject`; '#' begins a comment. Raises ConfigError (with line)."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the faults file {path} can not be read: {error}") from None
    faults = []
    for number, line in enumerate(lines, start=1):
        try:
            words = shlex.split(line, comments=True)
            if words:
                faults.append(_from_words(words))
        except ValueError as error:  # ConfigError is one
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return tuple(faults)


def _from_words(words: list[str]) -> Fault:
    kind, *rest = words
    options: dict[str, str] = {}
    while rest:
        name, *rest = rest
        name, equals, value = name.partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"{name} needs a value")
            value, *rest = rest
        if name not in ("--target", "--at") or name in options:
            raise ConfigError(
                f"{name!r} is unknown or given twice: a line is CLASS --target member:ID --at step=N,phase=P"
            )
        options[name] = value
    if "--target" not in options:
        raise ConfigError("--target is missing: write --target member:ID")
    if "--at" not in options and kind in CLASSES:
        raise ConfigError("--at is missing: in a file every fault needs a place, such as --at step=3,phase=backward")
    return make_fault(kind, options["--target"], options.get("--at"))
