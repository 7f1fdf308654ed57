"""The clocks of a job's hosts. Nothing that a job decides rests on them, but logs, checkpoints and certificates do.

Hosts compare their clocks once, when they meet. A clock that jumps later changes nothing.
"""

from __future__ import annotations

import time

CLOCK_S = 600.0
"""Greatest difference between the clocks of two hosts of a job, in seconds."""


def wall_s() -> float:
    """Return the seconds since 1970 by this host's clock."""
    return time.time()


def wrong_clock(late_s: float, other: str) -> str:
    """Return a sentence about the clocks of this host and `other`, or "" if they agree.

    late_s: this host's clock minus the other one's.
    """
    if abs(late_s) <= CLOCK_S:
        return ""
    ahead = "ahead of" if late_s > 0 else "behind"
    return f"the clock of this host is {abs(late_s):.0f} s {ahead} that of {other}: set both by NTP, and start again"
