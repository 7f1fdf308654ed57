"""Times that an agent waits for. The table of deadlines in `docs/deadlines.md` shows how they nest."""

from __future__ import annotations

from dataclasses import dataclass

CLOCK_S = 600.0
"""Greatest difference between the clocks of two hosts of a job when they meet. Later jumps change nothing."""


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """Times for joining, failures and the end of a job, in seconds."""

    join_timeout_s: float = 120.0
    """Limit for the minimum number of nodes to arrive, then from the first worker's hello to the last one's."""
    last_call_s: float = 5.0
    """Wait for more nodes after the minimum number has arrived."""
    warm_up_s: float = 15.0
    """Limit for a joiner's warm-up at low priority. Until it is a member, the state has fewer copies."""
    restart_counts_s: float = 3600.0
    """A restart stops counting this long after the restarted worker committed its first step."""
    suspicion_s: float = 1.0
    leave_timeout_s: float = 2.0
    """Limit for a worker that must end to end by itself, for instance to print its traceback."""
    exit_timeout_s: float = 30.0
    """Limit for a worker to end after its work is done. Then, limit for the digests of other nodes to arrive."""
    silence_grace_s: float = 0.5
    """Delay from the first silent node to the judgement.

    A node that is cut off sees the other nodes fall silent one by one, and must see all of them first.
    """
    meet_s: float = 2.0
    """Limit for an answer from a node that this agent never met and whose lease ended. It may only have been slow."""
    absent_s: float = 6.0
    """Limit for a node with members in the view to have neither key nor link. Then its members count as dead."""
    ask_again_s: float = 0.5
    """Delay before the agent retries a call that the store did not answer."""
    park_timeout_s: float = 3600.0
    """Limit for this node to wait for the store, or for nodes that are only silent, before it ends."""


@dataclass(frozen=True, kw_only=True)
class HangTimes:
    """Limits for a member to show no sign of life while other members wait for it, in seconds."""

    hang_timeout_s: float = 2.5
    """Limit in a micro-batch, or 2.5 median steps if these are longer. 0 disables hang detection."""
    between_steps_s: float = 30.0
    """Limit in the script's own code between two steps, outside of any phase."""
    first_step_s: float = 600.0
    """Limit in the very first step of the job."""
    join_step_s: float = 60.0
    """Limit in a newcomer's first step, or 20 median steps if these are longer.

    Also the limit for all members until four steps are committed.
    """
    alike_s: float = 1800.0
    """Limit if all members are stuck at the same place, and for a stuck member with the only copy of a shard."""
    stacks_s: float = 0.3
    """Limit for writing stacks before a member that hangs is killed."""


@dataclass(frozen=True, kw_only=True)
class LeaveTimes:
    """Times that a node waits after it was told to leave, in seconds."""

    hand_over_s: float = 5.0
    """Wait for the end of its members' current step, if other nodes continue."""
    last_checkpoint_s: float = 0.0
    """Wait for one last checkpoint, if no other node continues. 0: no last checkpoint is written."""
    together_s: float = 0.5
    """Wait for other nodes to report that they were told to leave, too."""


def wrong_clock(late_s: float, other: str) -> str:
    """Return a sentence about the clocks of this host and `other`, or "" if they agree.

    late_s: this host's clock minus the other one's.
    """
    if abs(late_s) <= CLOCK_S:
        return ""
    ahead = "ahead of" if late_s > 0 else "behind"
    return f"the clock of this host is {abs(late_s):.0f} s {ahead} that of {other}: set both by NTP, and start again"
