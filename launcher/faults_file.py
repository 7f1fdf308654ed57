"""A file of faults: a line each, as after `elastrain inject`."""

from __future__ import annotations

from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.fault import Fault


def read_faults(path: Path) -> tuple[Fault, ...]:
    """One fault per line, as after `elastrain inject`; '#' begins a comment. Raises ConfigError (with line)."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the faults file {path} cannot be read: {error}") from None
    faults = []
    for number, line in enumerate(lines, start=1):
        try:
            words = grammar.split(line)
            if words:
                faults.append(_placed(grammar.from_words(words)))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return tuple(faults)


def _placed(fault: Fault) -> Fault:
    if fault.place.at_once:
        raise ConfigError(
            "--at is missing: in a file every fault needs a place, such as --at step=3,phase=backward or --at t=10"
        )
    return fault
