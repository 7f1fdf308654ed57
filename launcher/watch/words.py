"""Times, sizes and rates as short texts for people. Unknown values become a dash."""

from __future__ import annotations

DASH = "-"


def or_dash(value: object) -> str:
    """Return the value as text; a dash for None and for an empty text."""
    return DASH if value is None or value == "" else str(value)


def duration(seconds: float | None) -> str:
    """Return a duration with at most two units, such as "1 h 05 min", "2 min 07 s", "9.1 s" or "31 ms"."""
    if seconds is None:
        return DASH
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def size(size_bytes: float | None) -> str:
    """Return a size with a decimal unit."""
    if size_bytes is None:
        return DASH
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return (
                f"{size_bytes / factor:.3g} {unit}"
                if size_bytes < 999.5 * factor
                else f"{size_bytes / factor:.0f} {unit}"
            )
    return f"{size_bytes:.0f} B"


def memory(held_bytes: int | None, limit_bytes: int | None) -> str:
    """Return held memory, or its share of the limit if there is one."""
    if held_bytes is None or limit_bytes is None:
        return size(held_bytes) if limit_bytes is None else f"{DASH} of {size(limit_bytes)}"
    return f"{100 * held_bytes / limit_bytes:.0f} % of {size(limit_bytes)}"


def rate(per_minute: float | None) -> str:
    """Return a number of steps per minute."""
    return DASH if per_minute is None else f"{per_minute:.3g}" if per_minute < 999.5 else f"{per_minute:.0f}"


def plural(number: int, one: str, several: str = "") -> str:
    """Return the number with its noun."""
    return f"{number} {one if number == 1 else several or one + 's'}"
