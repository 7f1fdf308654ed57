"""Judgement of which of two members is wrong, if both must have equal bits and do not. Each verdict has its reason.

The wrong member drops its data, and the step starts again with the other's (`member/integrity/repair.py`). If no rule
decides, the job ends on all nodes, because going on could keep wrong bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A shard's state after `step` has digest `told` at its primary and `found` at its backup `member`."""

    shard: int
    step: int
    member: str
    primary: str
    told: int
    found: int

    def __str__(self) -> str:
        return (
            f"the state of shard {self.shard} after step {self.step} differs between its primary {self.primary} and "
            f"its backup {self.member}"
        )


class Side(Enum):
    """The side that is wrong."""

    NONE = "no member any more"
    MEMBER = "the member that asked"
    PRIMARY = "the primary"
    UNKNOWN = "one of the two"


@dataclass(frozen=True)
class Verdict:
    """A judgement with its reason."""

    wrong: Side
    reason: str


def look_again(
    difference: Difference, *, verified: int | None, verified_now: int, has_gradient: bool, found_now: int
) -> Verdict | None:
    """Judge by what the backup can find out alone. Returns None if other members have to be asked.

    verified: digest of its state before the step, as compared with the primary's; None if it never was compared.
    verified_now: digest of the same state now.
    has_gradient: True if the gradient that it keeps is still what its primary had.
    found_now: digest of the update, made again from that state.
    """
    d = difference
    # The backup looks at itself first: that costs no message, and a fault of its own must not end the job.
    changed = _changed_here(d.member, verified, verified_now, has_gradient)
    if changed:
        return Verdict(Side.MEMBER, f"{d}: {changed}")
    # The difference is gone. A replacement would cost a member and repair nothing.
    if found_now == d.told:
        return Verdict(Side.NONE, f"{d}, but computed again it is equal: {d.member} had a passing fault")
    # Neither of its two results can be trusted, so a third copy would say nothing about the primary.
    if found_now != d.found:
        return Verdict(Side.MEMBER, f"{d}: {d.member} computes the same update with another result each time")
    return None


def _changed_here(member: str, verified: int | None, verified_now: int, has_gradient: bool) -> str:
    """Return which input of the update has changed in the member's memory, in words; empty if none has."""
    # If nothing was ever compared, nothing is known to have changed.
    if verified is not None and verified_now != verified:
        return f"what {member} keeps has changed in its memory since it was verified"
    if not has_gradient:
        return f"the gradient that {member} keeps has changed in its memory since it came"
    return ""


def look_before_taking_over(
    *, shard: int, step: int, member: str, verified: int | None, verified_now: int, has_gradient: bool
) -> str:
    """Return why a `member` that has become a shard's primary must not be it; empty if nothing is wrong.

    verified: digest of the state that it takes over with, as compared with the lost primary's; None if it never was.
    verified_now: digest of the same state now. has_gradient: as in `look_again`.
    """
    changed = _changed_here(member, verified, verified_now, has_gradient)
    return f"{member} was to take over shard {shard} after step {step}: {changed}" if changed else ""


def judge(difference: Difference, answers: Mapping[str, int | None]) -> Verdict:
    """Judge by the other members' copies: a third copy decides between the two.

    answers: member -> digest of its present state of the shard after the step; None if it has none.
    """
    d = difference
    # A primary that no longer has what it reported is wrong, also without a third copy.
    now = answers.get(d.primary)
    if now is not None and now != d.told:
        return Verdict(Side.PRIMARY, f"{d}: it has changed in the memory of {d.primary} since then")
    # The primary's own digest is not a third copy: it was reported before.
    third = {member: digest for member, digest in answers.items() if member != d.primary}
    with_me = sorted(member for member, digest in third.items() if digest == d.found)
    with_primary = sorted(member for member, digest in third.items() if digest == d.told)
    # Only if all third copies agree: two that differ prove a fault, but not whose.
    if with_me and not with_primary:
        reason = f"{', '.join(with_me)} has what {d.member} has: {d.primary} is wrong, and has published it"
        return Verdict(Side.PRIMARY, f"{d}; {reason}")
    if with_primary and not with_me:
        return Verdict(Side.MEMBER, f"{d}, and {', '.join(with_primary)} has what {d.primary} has: {d.member} is wrong")
    return Verdict(Side.UNKNOWN, f"{d}: no third copy tells which of the two is wrong")


def judge_trial(difference: Difference, made: int | None) -> Verdict:
    """Judge by the primary's update of the backup's former state with the backup's gradient.

    made: digest of that update, computed by the primary. None if the state or gradient that came was not what the
        primary
    had then.
    """
    d = difference
    again = f"{d.primary} has made the update again, from what both had before"
    # From another starting state, the result would say nothing about either.
    if made is None:
        reason = f"what {d.member} has sent of the step before is not what {d.primary} had then"
        return Verdict(Side.UNKNOWN, f"{d}: {reason}")
    # Two machines have computed the same result: so the other value was wrong in a memory.
    if made == d.found:
        return Verdict(Side.PRIMARY, f"{d}: {again}, and gets what {d.member} has: its own was wrong in its memory")
    if made == d.told:
        return Verdict(Side.MEMBER, f"{d}: {again}, and gets what it had: {d.member} computes wrongly")
    return Verdict(Side.UNKNOWN, f"{d}: {again}, and gets a third result")


def judge_copy(*, shard: int, step: int, receiver: str, sender: str, told: int, now: int | None) -> Verdict:
    """Judge a copy that came twice with another digest than `told`. `now`: present digest of the sender's state."""
    # Twice, because one damaged copy may have been damaged on its way, and is requested again.
    copy = f"the copy of shard {shard} after step {step} came twice from {sender} to {receiver} with other content"
    # `now` is read from the state itself: a digest that was kept beside it could not show a change.
    if now == told:
        return Verdict(Side.MEMBER, f"{copy}; {sender} has it unchanged: {receiver} is wrong")
    return Verdict(Side.PRIMARY, f"{copy}: it has changed in the memory of {sender}")


def judge_parameters(*, shard: int, step: int, member: str, publisher: str, told: int, now: int | None) -> Verdict:
    """Judge a `member` that computes with other parameters than `publisher` published with digest `told`.

    now: digest of what the publisher has at present. The step starts again in either case, because gradients computed
        with
    wrong parameters may be in other members' sums already.
    """
    # A publisher that no longer has what it published is wrong, whichever member noticed.
    if member == publisher or now != told:
        return Verdict(
            Side.PRIMARY,
            f"the parameters of shard {shard} have changed in the memory of {publisher}, its primary, since they were "
            f"published after step {step}",
        )
    return Verdict(
        Side.MEMBER,
        f"{member} computes with other parameters of shard {shard} than {publisher} published after step {step} (and "
        f"still has): they have changed in the memory of {member} or on the way there",
    )


def changed_since(*, shard: int, step: int, member: str) -> str:
    """Return a sentence: the `member` no longer has the shard's state that it reported."""
    return f"what {member} has of shard {shard} after step {step} has changed in its memory since it was told"


def other_primary(*, shard: int, step: int, member: str) -> str:
    """Return a sentence: `member` became a shard's primary, and its state is not what the last primary published."""
    return (
        f"the parameters of shard {shard} that its last primary published after step {step} are not those of the "
        f"verified state at {member}"
    )
