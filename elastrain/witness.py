"""Judges which of two members is wrong, where both must agree to the bit and do not. Each verdict has its reason.

If the member that noticed the difference is wrong, it ends, and the others go on with the right bits. If the primary
is wrong, its parameters may be in gradients that are committed already. Then, and where nobody can tell, the job ends
on all nodes: going on would break the promise, and there is no durable checkpoint to go back to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

_START_AGAIN = "start the job again without that machine"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A shard's state after `step` has the digest `told` at its primary, and `found` at its backup `member`."""

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


class Ends(Enum):
    """What a verdict ends."""

    NOTHING = "nothing"
    MEMBER = "the member that asked"
    JOB = "the job"


@dataclass(frozen=True)
class Verdict:
    ends: Ends
    reason: str


def look_again(difference: Difference, *, verified: int | None, verified_now: int, found_now: int) -> Verdict | None:
    """Judge by what the backup can find out alone; None if others have to be asked.

    verified: the digest of its state before the step, as it was compared with the primary's; None if it never was.
    verified_now: the digest of the same state now.
    found_now: the digest of the update, made again from that state.
    """
    d = difference
    # The backup looks at itself first: that costs no message, and a fault of its own must not end the job.
    if verified is not None and verified_now != verified:
        reason = f"what {d.member} keeps has changed in its memory since it was verified; {_START_AGAIN} if this recurs"
        return Verdict(Ends.MEMBER, f"{d}: {reason}")
    if found_now == d.told:
        return Verdict(Ends.NOTHING, f"{d}, but computed again it is equal: {d.member} had a passing fault")
    # Neither of its two results can be trusted, so that a third copy would decide nothing about the primary.
    if found_now != d.found:
        return Verdict(Ends.MEMBER, f"{d}: {d.member} computes the same update with another result each time")
    return None


def judge(difference: Difference, answers: Mapping[str, int | None]) -> Verdict:
    """Judge by what the others have: a third copy decides between the two.

    answers: member -> digest of the shard's state after the step as it is there now; None where it has none.
    """
    d = difference
    # Without a third copy, a primary that no longer has what it told is known to be wrong all the same.
    now = answers.get(d.primary)
    if now is not None and now != d.told:
        return Verdict(Ends.JOB, f"{d}: it has changed in the memory of {d.primary} since then; {_START_AGAIN}")
    # The primary's own word is no third copy: it told it before.
    third = {member: digest for member, digest in answers.items() if member != d.primary}
    with_me = sorted(member for member, digest in third.items() if digest == d.found)
    with_primary = sorted(member for member, digest in third.items() if digest == d.told)
    if with_me and not with_primary:
        reason = f"{', '.join(with_me)} has what {d.member} has: {d.primary} is wrong, and has published it"
        return Verdict(Ends.JOB, f"{d}; {reason}; {_START_AGAIN}")
    if with_primary and not with_me:
        return Verdict(Ends.MEMBER, f"{d}, and {', '.join(with_primary)} has what {d.primary} has: {d.member} is wrong")
    reason = "no third copy tells which of the two is wrong; start the job again without one of them, then the other"
    return Verdict(Ends.JOB, f"{d}: {reason}")


def judge_copy(*, shard: int, step: int, receiver: str, sender: str, told: int, now: int | None) -> Verdict:
    """Judge a copy that came twice with another digest than `told`; `now` is that of the sender's state, made again."""
    # Twice, because a copy that is damaged once may have had bad luck on its way: it is asked for again.
    copy = f"the copy of shard {shard} after step {step} came twice from {sender} to {receiver} with other content"
    if now == told:
        return Verdict(Ends.MEMBER, f"{copy}; {sender} has it unchanged: {receiver} is wrong")
    return Verdict(Ends.JOB, f"{copy}, and it has changed in the memory of {sender}; {_START_AGAIN}")


def judge_parameters(*, shard: int, step: int, member: str, publisher: str, told: int, now: int | None) -> Verdict:
    """Judge a `member` that computes with other parameters than `publisher` published with the digest `told`.

    now: the digest of what the publisher has at present. The job ends whoever is wrong, because gradients that were
    computed with the wrong parameters may be in other members' sums already.
    """
    # A publisher that no longer has what it published has convicted itself, whoever noticed.
    if member == publisher or now != told:
        return Verdict(
            Ends.JOB,
            f"the parameters of shard {shard} have changed in the memory of {publisher}, its primary, since they were "
            f"published after step {step}; {_START_AGAIN}",
        )
    return Verdict(
        Ends.JOB,
        f"{member} computes with other parameters of shard {shard} than {publisher} published after step {step} (and "
        f"still has): they have changed in the memory of {member} or on the way there, and what it computed "
        f"with them may be in the sums of others; {_START_AGAIN}",
    )


def other_primary(*, shard: int, step: int, member: str) -> Verdict:
    """Judge a `member` that has become a shard's primary, and whose state is not what the last primary published."""
    return Verdict(
        Ends.JOB,
        f"the parameters of shard {shard} that its last primary published after step {step} are not those of its copy "
        f"at {member}: one of the two is wrong, and gradients may have been computed with it; start the job again",
    )
