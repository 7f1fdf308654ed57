"""The founding of the quorum: the named hosts agree on one charter, which lists the first etcd members.

Each host repeatedly reads the state of the other named hosts and calls `step`. Two charters can never both work:

* A charter lists the instances of at least a majority of the named hosts. etcd works with a majority of a charter.
* A host starts etcd for a charter only if the charter lists its own instance, and it does so at most once.
* Only the founder starts first, after every instance in the charter has promised. The other hosts start when they see
  a host that has started.

An instance is one start of one agent with an empty data folder. A host that comes back has a new instance. It is never
taken for the member that it was, because its data is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MEMBERS_MAX = 3
"""Most etcd members of a quorum, and most hosts of --join."""
GRACE_S = 10.0
"""Seconds that a majority of the named hosts waits for the others before it founds the quorum without them."""
SILENT_S = 5.0
"""Seconds without an answer after which the draft of a silent founder no longer binds."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """An etcd member of a charter."""

    place: int
    """Position of its host in --join."""
    instance: str
    peer: str
    """Address for other etcd members, HOST:PORT."""


@dataclass(frozen=True, kw_only=True)
class Charter:
    """The first members of a quorum. `token` is unique."""

    token: str
    members: tuple[Named, ...]

    def lists(self, instance: str) -> bool:
        """Return True if this instance is a first member."""
        return any(member.instance == instance for member in self.members)


@dataclass(frozen=True, kw_only=True)
class FoundingState:
    """State of one named host during the founding, as other hosts read it."""

    me: Named
    promised: Charter | None = None
    """The charter that this host has drafted, or has promised to start when its founder starts."""
    started: Charter | None = None
    """The charter for which this host has started etcd. It never starts another one."""
    serves: bool = False
    """True if the quorum of `started` has answered, or if the host takes part in a quorum without being in its
    charter."""


@dataclass(frozen=True, kw_only=True)
class HeardState:
    """The last answer of another named host, and the seconds since it."""

    state: FoundingState
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FoundingRules:
    """Rules that the simulation switches off to show that it finds their absence."""

    compares_instances: bool = True


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Facts of one step beside this host's own state: the other hosts, the time, and a token for a new charter."""

    named: int
    """Number of hosts in --join."""
    heard: Mapping[int, HeardState]
    """Answers of the other hosts, by place. A host without an answer is missing."""
    waited_s: float
    grace_s: float = GRACE_S
    """Seconds to wait for named hosts that do not answer."""
    fresh_token: str
    rules: FoundingRules = FoundingRules()


@dataclass(frozen=True, kw_only=True)
class Founding:
    """The new state of this host, the charter that it must join as a newcomer, and the reason in words."""

    state: FoundingState
    joins: Charter | None = None
    reason: str


def majority(count: int) -> int:
    """Return the least number of members that are more than half."""
    return count // 2 + 1


def step(mine: FoundingState, outlook: Outlook) -> Founding:
    """Return the next state of this host from its own state and the answers of the other named hosts."""
    standing = _standing(mine, outlook)
    if mine.started is not None:
        return _after_start(mine, standing)
    if standing is not None and _lists_me(standing.started, mine.me, outlook.rules):
        return Founding(
            state=replace(mine, promised=standing.started, started=standing.started),
            reason=f"host {standing.me.place + 1} of --join has started the quorum with this host",
        )
    if standing is not None and standing.serves:
        return Founding(state=replace(mine, promised=None), joins=standing.started, reason="a quorum works already")
    if standing is not None:
        return Founding(state=mine, reason="a quorum without this host has begun to start")
    return _before_start(mine, outlook)


def _standing(mine: FoundingState, outlook: Outlook) -> FoundingState | None:
    """Return the state of another host that has started: one whose quorum works if there is one."""
    states = [heard.state for heard in outlook.heard.values() if heard.age_s < SILENT_S]
    started = [state for state in states if state.started is not None and state.me.place != mine.me.place]
    listing = [state for state in started if state.started is not None and state.started.lists(mine.me.instance)]
    serving = [state for state in started if state.serves]
    return next(iter([*serving, *listing, *started]), None)


def _lists_me(charter: Charter | None, me: Named, rules: FoundingRules) -> bool:
    if charter is None:
        return False
    if rules.compares_instances:
        return charter.lists(me.instance)
    return any(member.place == me.place for member in charter.members)


def _after_start(mine: FoundingState, standing: FoundingState | None) -> Founding:
    other = standing.started if standing is not None and standing.serves else None
    if not mine.serves and other is not None and other != mine.started:
        return Founding(state=mine, joins=other, reason="another quorum works, and that of this host has never worked")
    return Founding(state=mine, reason="it is started")


def _before_start(mine: FoundingState, outlook: Outlook) -> Founding:
    near = {place: heard.state for place, heard in outlook.heard.items() if heard.age_s < SILENT_S}
    founder = min(near, default=mine.me.place)
    if founder < mine.me.place:
        return _follow(mine, near[founder])
    here = 1 + len(near)
    if here < majority(outlook.named):
        return Founding(state=replace(mine, promised=None), reason=f"{here} of {outlook.named} named hosts are here")
    members = tuple(sorted((mine.me, *(state.me for state in near.values())), key=lambda member: member.place))
    draft = mine.promised
    if draft is None or draft.members != members:
        if here < outlook.named and outlook.waited_s < outlook.grace_s:
            return Founding(
                state=replace(mine, promised=None), reason=f"{here} of {outlook.named} named hosts are here"
            )
        draft = Charter(token=outlook.fresh_token, members=members)
        return Founding(state=replace(mine, promised=draft), reason="this host drafts the quorum")
    if all(state.promised == draft for state in near.values()):
        return Founding(state=replace(mine, started=draft), reason="all named hosts that are here have promised")
    return Founding(state=mine, reason="promises are missing")


def _follow(mine: FoundingState, founder: FoundingState) -> Founding:
    draft = founder.promised
    if draft is not None and draft.lists(mine.me.instance) and draft.lists(founder.me.instance):
        return Founding(
            state=replace(mine, promised=draft), reason=f"promised to host {founder.me.place + 1} of --join"
        )
    return Founding(
        state=replace(mine, promised=None), reason=f"host {founder.me.place + 1} of --join will found the quorum"
    )
