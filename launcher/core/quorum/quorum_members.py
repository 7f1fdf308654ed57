"""The members of the quorum after its founding: who is removed, who comes in, and when.

Every agent calls `decide` about once a second with a listing of the store. The agent beside etcd's leader removes and
promotes. The chosen candidate adds itself. A lost member is removed first, and one change is made at a time, because
two changes at once could leave two groups that each hold themselves for the majority.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.launcher.core.quorum.founding import MEMBERS_MAX, majority

LOST_S = 2.0
"""Seconds that a member must be silent, beside the end of its agent's lease, before it counts as lost for good."""
LEARN_S = 20.0
"""Seconds that a learner has to start and to answer before its place is given to another node."""


@dataclass(frozen=True, kw_only=True)
class QuorumMember:
    """An etcd member, as etcd lists it and as it answers."""

    id: str
    instance: str
    """Instance of the agent that has started it, or "" if it has not started yet."""
    is_learner: bool = False
    silent_s: float = 0.0
    """Seconds since its last answer, or since it was first listed."""


@dataclass(frozen=True, kw_only=True)
class QuorumCandidate:
    """An agent that could run an etcd member. Its key in the store lives by a lease."""

    instance: str
    is_named: bool
    """True if --join names its host."""
    since: int
    """Revision at which its key was created."""


@dataclass(frozen=True, kw_only=True)
class MembershipRules:
    """Rules that the simulation switches off to show that it finds their absence."""

    one_at_a_time: bool = True
    keeps_needed: bool = True


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Knowledge of one agent about the quorum at one moment."""

    members: tuple[QuorumMember, ...]
    candidates: tuple[QuorumCandidate, ...]
    me: str
    """Instance of the agent that decides."""
    leads: bool
    """True if etcd's leader is the member of this agent."""
    rules: MembershipRules = MembershipRules()

    @property
    def voters(self) -> tuple[QuorumMember, ...]:
        """Members that vote."""
        return tuple(member for member in self.members if not member.is_learner)

    @property
    def learners(self) -> tuple[QuorumMember, ...]:
        """Members that only receive the log so far."""
        return tuple(member for member in self.members if member.is_learner)

    def is_present(self, member: QuorumMember) -> bool:
        """Return True if the agent of this member has a key in the store."""
        return any(candidate.instance == member.instance for candidate in self.candidates)


@dataclass(frozen=True, kw_only=True)
class Remove:
    """Remove a member from the quorum."""

    member: str


@dataclass(frozen=True, kw_only=True)
class Promote:
    """Let a learner vote. etcd refuses this until the learner has the log."""

    member: str


@dataclass(frozen=True, kw_only=True)
class AddMe:
    """Add the deciding agent itself as a learner, and start its etcd."""


@dataclass(frozen=True, kw_only=True)
class QuorumDecision:
    """An action or None, and the reason in words."""

    action: Remove | Promote | AddMe | None
    reason: str


def decide(observed: Observed) -> QuorumDecision:
    """Return what the deciding agent has to do now."""
    learners = observed.learners
    if learners and observed.rules.one_at_a_time:
        return _of_learner(observed, learners[0])
    lost = _lost_voter(observed)
    if lost is not None:
        return lost
    return _of_room(observed)


def _of_learner(observed: Observed, learner: QuorumMember) -> QuorumDecision:
    if not observed.leads:
        return QuorumDecision(action=None, reason="a member is being added")
    if len(observed.voters) >= MEMBERS_MAX:
        return QuorumDecision(action=Remove(member=learner.id), reason="the quorum has all its members")
    is_gone = learner.instance != "" and not observed.is_present(learner) and learner.silent_s >= LOST_S
    if is_gone or learner.silent_s >= LEARN_S:
        return QuorumDecision(action=Remove(member=learner.id), reason="the member that was being added is lost")
    if learner.instance and learner.silent_s < LOST_S:
        return QuorumDecision(action=Promote(member=learner.id), reason="the new member answers")
    return QuorumDecision(action=None, reason="a member is being added")


def _lost_voter(observed: Observed) -> QuorumDecision | None:
    """Return what follows from a lost voter, or None if there is none."""
    voters = observed.voters
    careful = observed.rules.keeps_needed
    lost = [voter for voter in voters if voter.silent_s >= LOST_S and not (careful and observed.is_present(voter))]
    if not lost:
        return None
    answering = sum(voter.silent_s < LOST_S for voter in voters)
    if careful and answering < majority(len(voters)):
        return QuorumDecision(action=None, reason=f"only {answering} of {len(voters)} etcd members answer")
    if not observed.leads:
        return QuorumDecision(action=None, reason="a member is lost, and the leader will remove it")
    return QuorumDecision(action=Remove(member=lost[0].id), reason="its node is lost")


def _of_room(observed: Observed) -> QuorumDecision:
    taken = {member.instance for member in observed.members}
    wanted = min(MEMBERS_MAX, len(observed.candidates))
    if len(observed.voters) >= wanted:
        return QuorumDecision(action=None, reason="the quorum has all its members")
    waiting = [candidate for candidate in observed.candidates if candidate.instance not in taken]
    if not waiting:
        return QuorumDecision(action=None, reason="no node is free for another member")
    silent = sum(voter.silent_s >= LOST_S for voter in observed.voters)
    if silent:
        return QuorumDecision(action=None, reason="a member is silent: none is added until it answers or is removed")
    first = min(waiting, key=lambda each: (not each.is_named, each.since, each.instance))
    if first.instance != observed.me:
        return QuorumDecision(action=None, reason="another node is to become a member")
    return QuorumDecision(action=AddMe(), reason=f"the quorum has {len(observed.voters)} of {wanted} members")


@dataclass(frozen=True, kw_only=True)
class EndedEtcd:
    """Facts about this node's etcd process that has ended by itself."""

    others_work: bool
    """True if the quorum answers without this member."""


def keeps_data(ended: EndedEtcd) -> bool:
    """Return True if etcd starts again with its data, False if it comes back as a new member with an empty log.

    Data on disk was written without fsync, so a new member is safer where the quorum works without it. Without the
    others, the data is needed.
    """
    return not ended.others_work


def meaning(members: int) -> str:
    """Return what the loss of one etcd member means for a quorum of this size."""
    if members == 1:
        return "one etcd member: if its node is lost, training goes on, but no node can be lost or join any more"
    if members == 2:
        return (
            "two etcd members: if one of their nodes is lost, the job parks, because one of two is no majority; "
            "a third node would remove this limit"
        )
    return f"{members} etcd members: the loss of any one of them is survived"
