"""The clock of this host. Nothing that a job decides rests on it, but logs, checkpoints and certificates do."""

from __future__ import annotations

import time


def wall_s() -> float:
    """Return the seconds since 1970 by this host's clock."""
    return time.time()
