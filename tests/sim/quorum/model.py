"""Hosts, their agents and an etcd cluster as values, under a seeded scheduler with virtual time.

The etcd of the model keeps etcd's own promises: nothing changes without a majority of the voters, and a second learner
is refused. All other care has to come from the decisions under test.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from elastrain.launcher.core.quorum.founding import (
    SILENT_S,
    Charter,
    FoundingRules,
    FoundingState,
    HeardState,
    Named,
    Outlook,
    majority,
    step,
)
from elastrain.launcher.core.quorum.quorum_members import (
    LOST_S,
    AddMe,
    MembershipRules,
    Observed,
    Promote,
    QuorumCandidate,
    QuorumMember,
    Remove,
    decide,
)

TICK_S = 0.25
LEASE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A bug on request. The default has none."""

    founding: FoundingRules = field(default_factory=FoundingRules)
    membership: MembershipRules = field(default_factory=MembershipRules)
    etcd_takes_two_learners: bool = False


@dataclass(kw_only=True)
class Entry:
    """A member in the configuration of a modelled etcd cluster."""

    id: str
    instance: str
    is_learner: bool = False
    learns_from_s: float = 0.0


@dataclass(kw_only=True)
class Cluster:
    """A modelled etcd cluster. Its data lives as long as a majority of its voters does."""

    token: str
    entries: dict[str, Entry]
    keys: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Instance of each agent with a key: the end of its lease, and the revision."""
    revision: int = 1
    has_served: bool = False


@dataclass(kw_only=True)
class Host:
    """One host: its agent is alive or not; `runs` is the charter's token of its etcd."""

    place: int
    state: FoundingState
    named: bool
    alive: bool = True
    cut_off: bool = False
    began_s: float = 0.0
    runs: str | None = None
    heard: dict[int, tuple[FoundingState, float]] = field(default_factory=dict)
    seen_s: dict[str, float] = field(default_factory=dict)

    @property
    def instance(self) -> str:
        return self.state.me.instance


class QuorumError(AssertionError):
    """The simulation has found a violation."""


class World:
    """All hosts and clusters. `turn` plays one quarter of a second."""

    def __init__(self, seed: int, *, named: int = 3, spare: int = 1, plant: Plant | None = None) -> None:
        self.random, self.plant, self.named = random.Random(seed), plant or Plant(), named
        self.now = 0.0
        self.told: list[str] = []
        self.clusters: dict[str, Cluster] = {}
        self._numbers = itertools.count()
        self._acts: list[tuple[float, Host, str, str, Remove | Promote | AddMe]] = []
        self.hosts = [self._host(place) for place in range(named + spare)]
        for host in self.hosts:
            host.began_s = self.random.choice((0.0, 0.0, 1.0, 4.0))

    def _host(self, place: int) -> Host:
        return Host(place=place, state=self._fresh(place), named=place < self.named, began_s=self.now)

    def _fresh(self, place: int) -> FoundingState:
        instance = f"h{place}.{next(self._numbers)}"
        return FoundingState(me=Named(place=place, instance=instance, peer=f"h{place}:2380"))

    def lose(self, host: Host) -> None:
        self.told.append(f"{self.now}: {host.instance} is lost")
        host.alive = False

    def come_back(self, host: Host) -> None:
        self.hosts[self.hosts.index(host)] = back = self._host(host.place)
        self.told.append(f"{self.now}: host {host.place} is back as {back.instance}")

    def reach(self, one: Host, other: Host) -> bool:
        if one is other:
            return one.alive
        return one.alive and other.alive and not (one.cut_off or other.cut_off)

    def running(self, cluster: Cluster, entry: Entry) -> Host | None:
        """The host whose etcd is this member."""
        mine = [h for h in self.hosts if h.alive and h.runs == cluster.token and h.instance == entry.instance]
        return mine[0] if mine else None

    def working(self, cluster: Cluster, near: Host | None = None) -> list[Host]:
        """The hosts of the voters that form a majority together, or none. With `near`, it must reach one of them."""
        voters = [entry for entry in cluster.entries.values() if not entry.is_learner]
        hosts = [host for entry in voters if (host := self.running(cluster, entry)) is not None]
        groups = [[host for host in hosts if self.reach(first, host)] for first in hosts]
        group = max(groups, key=len, default=[])
        if len(group) < majority(len(voters)):
            return []
        return group if near is None or any(self.reach(near, host) for host in group) else []

    def turn(self) -> None:
        self.now += TICK_S
        for host in self.random.sample(self.hosts, len(self.hosts)):
            if host.alive and host.began_s <= self.now:
                self._hear(host)
                self._found(host)
                self._take_part(host)
        due = [act for act in self._acts if act[0] <= self.now]
        self._acts = [act for act in self._acts if act[0] > self.now]
        for _, host, instance, token, action in due:
            if host.alive and host.instance == instance:
                self._carry_out(host, self.clusters[token], action)
        self._check()

    def _hear(self, host: Host) -> None:
        for other in self.hosts:
            heard = other is not host and other.named and other.began_s <= self.now and self.reach(host, other)
            if heard and self.random.random() < 0.8:
                host.heard[other.place] = (other.state, self.now)

    def _found(self, host: Host) -> None:
        if host.state.serves:
            return
        if not host.named:
            serving = [state for state, heard_s in host.heard.values() if state.serves and state.started is not None]
            if serving and serving[0].started is not None:
                self._join(host, serving[0].started)
            return
        outlook = Outlook(
            named=self.named,
            heard={
                place: HeardState(state=state, age_s=self.now - at_s) for place, (state, at_s) in host.heard.items()
            },
            waited_s=self.now - host.began_s,
            fresh_token=f"t{next(self._numbers)}",
            rules=self.plant.founding,
        )
        before, founding = host.state, step(host.state, outlook)
        host.state = founding.state
        if founding.joins is not None:
            self._join(host, founding.joins)
        elif before.started is None and host.state.started is not None:
            self._start(host, host.state.started)
        elif host.state.started is not None and self.working(self.clusters[host.state.started.token], host):
            host.state = replace(host.state, serves=True)

    def _join(self, host: Host, charter: Charter) -> None:
        if self.clusters[charter.token].has_served:
            host.runs = None
            host.state = replace(host.state, promised=None, started=charter, serves=True)

    def _start(self, host: Host, charter: Charter) -> None:
        self.told.append(f"{self.now}: {host.instance} starts {charter.token}")
        entries = {member.instance: Entry(id=member.instance, instance=member.instance) for member in charter.members}
        self.clusters.setdefault(charter.token, Cluster(token=charter.token, entries=entries))
        host.runs = charter.token
        if not charter.lists(host.instance):
            raise QuorumError(f"{host.instance} stands in for an older life of its host, with an empty log")

    def _take_part(self, host: Host) -> None:
        charter = host.state.started
        if charter is None or not host.state.serves:
            return
        cluster = self.clusters[charter.token]
        if not self.working(cluster, host):
            return
        cluster.has_served = True
        _, since = cluster.keys.get(host.instance, (0.0, cluster.revision))
        cluster.revision += 1
        cluster.keys[host.instance] = (self.now + LEASE_S, since)
        decision = decide(self._observed(host, cluster))
        if decision.action is not None and self.random.random() < 0.7:
            # A removal is decided once more at the moment at which it is done.
            delay_s = 0.0 if isinstance(decision.action, Remove) else self.random.choice((0.0, 0.0, 0.25, 0.5))
            self._acts.append((self.now + delay_s, host, host.instance, cluster.token, decision.action))

    def _observed(self, host: Host, cluster: Cluster) -> Observed:
        members = []
        for entry in cluster.entries.values():
            running = self.running(cluster, entry)
            if running is not None and self.reach(host, running):
                host.seen_s[entry.id] = self.now
            silent_s = self.now - host.seen_s.setdefault(entry.id, self.now)
            started = "" if entry.is_learner and running is None and entry.id not in host.seen_s else entry.instance
            members.append(QuorumMember(id=entry.id, instance=started, is_learner=entry.is_learner, silent_s=silent_s))
        living = {instance: since for instance, (until_s, since) in cluster.keys.items() if until_s > self.now}
        places = {h.instance: h.named for h in self.hosts}
        return Observed(
            members=tuple(members),
            candidates=tuple(
                QuorumCandidate(instance=instance, is_named=places.get(instance, False), since=since)
                for instance, since in living.items()
            ),
            me=host.instance,
            leads=self.working(cluster)[:1] == [host],
            rules=self.plant.membership,
        )

    def _carry_out(self, host: Host, cluster: Cluster, action: Remove | Promote | AddMe) -> None:
        if not self.working(cluster, host):
            return
        self.told.append(f"{self.now}: {host.instance} does {action}")
        match action:
            case Remove(member=member):
                self._remove(cluster, member)
            case Promote(member=member):
                entry = cluster.entries.get(member)
                if entry is not None and self.running(cluster, entry) and self.now - entry.learns_from_s > 1.0:
                    entry.is_learner = False
            case AddMe():
                self._add(host, cluster)

    def _remove(self, cluster: Cluster, member: str) -> None:
        entry = cluster.entries.pop(member, None)
        if entry is None:
            return
        if not self.working(cluster):
            raise QuorumError(f"{member} was removed, and without it the quorum has no majority")
        if not entry.is_learner and cluster.keys.get(entry.instance, (0.0, 0))[0] > self.now:
            raise QuorumError(f"{member} was removed, and the lease of its agent lives")

    def _add(self, host: Host, cluster: Cluster) -> None:
        learners = [entry for entry in cluster.entries.values() if entry.is_learner]
        if any(entry.instance == host.instance for entry in cluster.entries.values()):
            return
        if learners and not self.plant.etcd_takes_two_learners:
            return
        name = f"m{next(self._numbers)}"
        cluster.entries[name] = Entry(id=name, instance=host.instance, is_learner=True, learns_from_s=self.now)
        host.runs = cluster.token

    def _check(self) -> None:
        for cluster in self.clusters.values():
            learners = [entry.instance for entry in cluster.entries.values() if entry.is_learner]
            if len(learners) > 1:
                raise QuorumError(f"{' and '.join(learners)} are added at once")
            if len(cluster.entries) > 4:
                raise QuorumError(f"{len(cluster.entries)} members")
        working = [cluster.token for cluster in self.clusters.values() if self.working(cluster)]
        if len(working) > 1:
            raise QuorumError(f"{' and '.join(working)} work at once")

    def is_whole(self) -> bool:
        """True if a quorum works and has all the voters it could have, each of which runs."""
        working = [cluster for cluster in self.clusters.values() if self.working(cluster)]
        if len(working) != 1:
            return False
        entries = working[0].entries.values()
        wanted = min(3, sum(host.alive for host in self.hosts))
        return len(entries) == wanted and all(not e.is_learner and self.running(working[0], e) for e in entries)


def settle(world: World, limit_s: float) -> None:
    """Play until the quorum has been whole for a while. Raises QuorumError if that takes too long."""
    until_s, whole_since_s = world.now + limit_s, world.now
    while world.now - whole_since_s < LEASE_S + 2 * LOST_S:
        if world.now > until_s:
            raise QuorumError(f"not whole after {limit_s} s")
        world.turn()
        if not world.is_whole():
            whole_since_s = world.now


def play(world: World, losses: int = 4) -> None:
    """Found a quorum, then lose one host after the other; some come back, and some are only cut off for a while."""
    settle(world, 40.0)
    for _ in range(losses):
        for _ in range(world.random.randrange(8)):
            world.turn()
        host = world.random.choice([each for each in world.hosts if each.alive])
        if world.random.random() < 0.3:
            host.cut_off = True
            for _ in range(world.random.randrange(4, 40)):
                world.turn()
            host.cut_off = False
        else:
            world.lose(host)
            for _ in range(world.random.randrange(0, 60)):
                world.turn()
            world.come_back(host)
        settle(world, 60.0 + SILENT_S)
