"""How long an agent waits for what. How the times nest stands in the table of deadlines (`docs/deadlines.md`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JobTimes:
    """How long an agent waits for what, in seconds."""

    join_timeout_s: float = 120.0
    """For the least number of nodes; then from the first worker's hello to the last one's."""
    last_call_s: float = 5.0
    """For more nodes once the least number is there."""
    warm_up_s: float = 15.0
    """How long a joiner warms up at low priority at most: until it is a member, the state has fewer copies."""
    restart_counts_s: float = 3600.0
    """A restart no longer counts so long after what was started has committed its first step."""
    suspicion_s: float = 1.0
    leave_timeout_s: float = 2.0
    """How long a worker that must end may take to end by itself (to print its traceback, say)."""
    exit_timeout_s: float = 30.0
    """Likewise after its work is finished; and how long this node then waits for the digests of the others."""
    silence_grace_s: float = 0.5
    """From the first silent node to the judgement: a node that is cut off hears the others fall silent one by one."""
    meet_s: float = 2.0
    """How long a node whose lease ends before it was ever met may take to answer: it may only have been slow."""
    absent_s: float = 6.0
    """How long a node with members in the view may have neither key nor link before they are taken for dead."""
    ask_again_s: float = 0.5
    """When a store that did not answer is asked again."""
    park_timeout_s: float = 3600.0
    """How long this node waits for the store, or for nodes that are only silent, before it ends."""


@dataclass(frozen=True, kw_only=True)
class HangTimes:
    """How long a member may show no sign of life while others wait for it, in seconds."""

    hang_timeout_s: float = 2.5
    """In a micro-batch, or 2.5 median steps; 0: nothing is judged."""
    between_steps_s: float = 30.0
    """In the script's own code between two steps, outside of any phase."""
    first_step_s: float = 600.0
    """In the very first step of the job."""
    join_step_s: float = 60.0
    """In the first step of a member that came later, or 20 median steps; for all until four steps are committed."""
    alike_s: float = 1800.0
    """Where nobody waits, because all stand alike; and whoever alone has some state."""
    stacks_s: float = 0.3
    """How long stacks may take to be written before a member that hangs is ended."""


@dataclass(frozen=True, kw_only=True)
class LeaveTimes:
    """How long a node that is told to go waits before it goes, in seconds."""

    hand_over_s: float = 5.0
    """For the end of the step that its members are in, where others go on."""
    last_checkpoint_s: float = 0.0
    """For one last checkpoint, where nobody goes on; 0: none is written."""
    together_s: float = 0.5
    """For other nodes to say that they were told the same."""
