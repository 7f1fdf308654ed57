"""Knowledge of the loss of a member, and which report of it counts. Plain values: no sockets, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastrain.comm.wire.values import LossCause

REPORTS_MAX = 4096

# What is learnt later replaces only what says less: a proof is never taken back by a guess of somebody else.
_CERTAINTY = {
    LossCause.UNREACHED: 0,
    LossCause.BROKEN: 1,
    LossCause.LEFT_US_OUT: 2,
    LossCause.LEFT: 2,
    LossCause.DEAD: 2,
}
# What is told of a loss that this member did not see itself. LEFT_US_OUT is missing: it is a matter between two.
DESCRIPTIONS = {
    LossCause.UNREACHED: "it could not be reached",
    LossCause.BROKEN: "its connection to another member broke",
    LossCause.LEFT: "it left",
    LossCause.DEAD: "its process ended",
}


def says_more(one: LossCause, other: LossCause) -> bool:
    """Whether `one` is surer knowledge than `other`."""
    return _CERTAINTY[one] > _CERTAINTY[other]


def judge(
    cause: LossCause, reason: str, *, left_out: int | None, ended: bool, reported: LossCause | None
) -> tuple[LossCause, str]:
    """The cause and the reason that are told, of a link that ended here with `cause` and `reason`.

    `left_out`: what the peer itself said at the end (0: it leaves; else the generation that does without us), which
    explains everything. `ended`: its process is proven dead. `reported`: how others have lost it.
    """
    if left_out:
        return LossCause.LEFT_US_OUT, f"it went on without us in generation {left_out}"
    if left_out is not None:
        return LossCause.LEFT, DESCRIPTIONS[LossCause.LEFT]
    if ended:
        return LossCause.DEAD, DESCRIPTIONS[LossCause.DEAD]
    if reported is not None and says_more(reported, cause):
        return reported, DESCRIPTIONS[reported]
    return cause, reason


@dataclass(kw_only=True)
class Reports:
    """Losses that others report of members that are in no view of ours yet: they count once a view names them."""

    _by_member: dict[str, tuple[LossCause, int]] = field(default_factory=dict)  # with the generation of the report

    def note(self, member: str, cause: LossCause, generation: int) -> None:
        # A limit, because any id may be reported: whoever is left out is noticed later, by its silence.
        if len(self._by_member) < REPORTS_MAX:
            self._by_member[member] = (cause, generation)

    def take(self, member: str) -> tuple[LossCause, int] | None:
        return self._by_member.pop(member, None)

    def forget_until(self, generation: int) -> None:
        """Drop what was reported up to this generation: its view would name the member if it were still expected."""
        self._by_member = {member: told for member, told in self._by_member.items() if told[1] > generation}
