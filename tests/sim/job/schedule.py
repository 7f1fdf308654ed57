"""A schedule as a value: how large the job is, the scheduler's seed, and every fault with its time. It can be shrunk.

Whom a fault hits is a number, counted over those who live when it strikes, so that a schedule with one fault less is a
schedule, too.
"""

from __future__ import annotations

import random
from typing import TypeAlias

from msgspec import Struct, json
from msgspec.structs import replace

from elastrain.job.scaling import LossScale
from elastrain.job.values import Shape, ShardShape
from elastrain.job.world import PHASES


class Fault(Struct, frozen=True, kw_only=True, tag=True):
    """Base of all faults: when it strikes, in seconds since the start."""

    at_s: float


class Kill(Fault, frozen=True, kw_only=True):
    """A member dies: at once, or when it gets to `phase`, after `sends` more frames."""

    who: int
    phase: str = ""
    sends: int = 0


class Raise(Fault, frozen=True, kw_only=True):
    """A member's script raises."""

    who: int


class KillNode(Fault, frozen=True, kw_only=True):
    """A node loses its power, or only its agent is killed (and its workers after it); it may be started again."""

    node: int
    again_s: float | None = None
    is_silent: bool = False
    """Nobody says that its ports are closed."""
    agent_only: bool = False


class Preempt(Fault, frozen=True, kw_only=True):
    """A node is told to go; it may be started again after `again_s`, if it has gone by then."""

    node: int
    again_s: float | None = None


class KillAll(Fault, frozen=True, kw_only=True):
    """All nodes within `spread_s`; each may be started again."""

    spread_s: float = 0.0
    again_s: float | None = None


class KillHolders(Fault, frozen=True, kw_only=True):
    """All members that hold some shard, but for `spared` of them."""

    shard: int
    spared: int = 0


class Pause(Fault, frozen=True, kw_only=True):
    """A member, or a whole node with its agent, stands still."""

    who: int
    for_s: float
    is_node: bool = False


class Stall(Fault, frozen=True, kw_only=True):
    """A training loop stands still."""

    who: int
    for_s: float


class Straggle(Fault, frozen=True, kw_only=True):
    """All that a training loop computes takes so many times as long."""

    who: int
    factor: float
    for_s: float


class Cut(Fault, frozen=True, kw_only=True):
    """Two nodes, or a node and the store (`other` < 0), do not reach each other, in one direction or both."""

    node: int
    other: int
    for_s: float
    both: bool = True


class Isolate(Fault, frozen=True, kw_only=True):
    """A node reaches no other node; nor, with `store`, the store."""

    node: int
    for_s: float
    store: bool = False


class Slow(Fault, frozen=True, kw_only=True):
    """All that goes from one node to another takes so many times as long."""

    node: int
    other: int
    factor: float
    for_s: float


class Reset(Fault, frozen=True, kw_only=True):
    """The link between two members breaks, with all that is on its way; both live."""

    who: int
    other: int


class StoreAway(Fault, frozen=True, kw_only=True):
    """etcd does not answer; where it was started again, all leases have their full time again."""

    for_s: float
    restarts: bool = False


class StoreTorn(Fault, frozen=True, kw_only=True):
    """etcd loses its leader again and again: transactions end with an unknown outcome."""

    for_s: float


class Compact(Fault, frozen=True, kw_only=True):
    """Histories are thrown away: every watch breaks and lists again."""


class Wipe(Fault, frozen=True, kw_only=True):
    """etcd is there again without its data."""

    for_s: float = 1.0


class Join(Fault, frozen=True, kw_only=True):
    """Another node comes."""


class Misfit(Fault, frozen=True, kw_only=True):
    """The next worker that is started has another configuration."""


class Damage(Fault, frozen=True, kw_only=True):
    """A bit flips in the newest durable checkpoint."""


class DamageDisk(Fault, frozen=True, kw_only=True):
    """A bit flips in one of the files on a node's own disk."""

    node: int
    which: int


class LoseDisk(Fault, frozen=True, kw_only=True):
    """A node is lost with its own disk; it may be started again, with an empty one."""

    node: int
    again_s: float | None = None


class DiskFull(Fault, frozen=True, kw_only=True):
    """Nothing can be written for a while."""

    for_s: float


AnyFault: TypeAlias = (
    Kill
    | Raise
    | KillNode
    | Preempt
    | KillAll
    | KillHolders
    | Pause
    | Stall
    | Straggle
    | Cut
    | Isolate
    | Slow
    | Reset
    | StoreAway
    | StoreTorn
    | Compact
    | Wipe
    | Join
    | Misfit
    | Damage
    | DamageDisk
    | LoseDisk
    | DiskFull
)


class Schedule(Struct, frozen=True, kw_only=True):
    """All that a simulated job depends on."""

    seed: int
    nodes: int = 3
    workers: int = 1
    """Per node."""
    backups: int = 1
    steps: int = 4
    runs: int = 3
    one_host: bool = False
    """Nodes are simulated on one machine: deaths are proven, members' links cannot be cut."""
    check_every: int = 0
    slow_store: int = -1
    """The node that hears late of what is in the store; -1: none."""
    used_store: bool = False
    """The store has held other jobs: its revisions are high until it loses its data."""
    slow_behind: bool = False
    """Work that nobody waits for takes long."""
    resumes: int | None = None
    """The step after which the checkpoint stands that the job starts from; None: it starts anew."""
    checkpoint_every: int = 0
    """Every so many steps become durable checkpoints, and the job has a next life; 0: none."""
    local_disks: bool = False
    """They lie on nodes' own disks (`node_disks`)."""
    no_room: bool = False
    """Members have no memory for copies of states: each is written where it lies, before it changes."""
    faults: tuple[AnyFault, ...] = ()

    @property
    def ends_s(self) -> float:
        """When the last fault is over."""
        return max((fault.at_s + getattr(fault, "for_s", 0.0) for fault in self.faults), default=0.0)


_DECODER = json.Decoder(Schedule)


def to_text(schedule: Schedule) -> str:
    return json.encode(schedule).decode()


def from_text(text: str) -> Schedule:
    return _DECODER.decode(text)


def shape_of(schedule: Schedule) -> Shape:
    """A weight shared by the first and the last block, a frozen shard, and three blocks."""
    shards = (
        ShardShape(size_bytes=8, lanes=(0,)),
        ShardShape(size_bytes=9, lanes=(1,)),
        ShardShape(size_bytes=8, lanes=(0, 2)),
        ShardShape(size_bytes=8, lanes=(2,)),
    )
    return Shape(
        runs=schedule.runs,
        blocks=3,
        shards=shards,
        backups=schedule.backups,
        loss_scale=LossScale(initial=16.0, growth_interval=1),
        deterministic=True,
        cross_check_every=schedule.check_every,
    )


FROZEN = frozenset([3])
"""Shards without a gradient."""
_PHASES = tuple(phase for phase in PHASES if phase not in ("forward", "backward"))


def draw(seed: int) -> Schedule:
    """The schedule of this seed."""
    rng = random.Random(f"schedule {seed}")
    sizes = Schedule(
        seed=seed,
        nodes=rng.choice((1, 2, 2, 3, 3, 3, 4)),
        workers=rng.choice((1, 1, 1, 2)),
        backups=rng.choice((0, 1, 1, 1, 2)),
        steps=rng.choice((2, 3, 4, 5)),
        runs=rng.choice((1, 2, 3, 4)),
        one_host=rng.random() < 0.4,
        check_every=rng.choice((0, 0, 0, 1, 2)),
        slow_behind=rng.random() < 0.1,
    )
    slow_store = rng.randrange(sizes.nodes) if rng.random() < 0.2 else -1
    faults = _faults(rng, sizes)
    resumes = rng.choice((None, None, None, None, None, None, -1, 1))
    if sizes.nodes > 1 and rng.random() < 0.12:  # drawn last: the schedules of all others stay what they were
        faults = tuple(sorted((*faults, *_notices(rng, sizes)), key=lambda fault: fault.at_s))
    drawn = {"slow_store": slow_store, "faults": faults, "resumes": resumes}
    drawn["steps"] = sizes.steps if resumes is None else sizes.steps + resumes + 1
    return Schedule(**{**{f: getattr(sizes, f) for f in sizes.__struct_fields__}, **drawn})


def draw_lives(seed: int) -> Schedule:
    """A job that writes checkpoints, and loses everything once or several times."""
    rng = random.Random(f"lives {seed}")
    sizes = Schedule(
        seed=seed,
        nodes=rng.choice((1, 2, 3, 3)),
        workers=rng.choice((1, 1, 2)),
        backups=rng.choice((0, 1, 1, 2)),
        steps=rng.choice((5, 6, 7)),
        runs=rng.choice((1, 2, 3)),
        one_host=rng.random() < 0.5,
        checkpoint_every=rng.choice((1, 1, 2)),
    )
    faults, at_s = list[AnyFault](), 1.0
    for _ in range(rng.choice((1, 1, 2, 3))):
        at_s += rng.uniform(0.8, 2.5)
        faults += _losses(rng, round(at_s, 3), sizes)
    no_room = rng.random() < 0.25
    if rng.random() < 0.2:  # drawn last: the schedules of all others stay what they were
        faults += _notices(rng, sizes)
    return replace(sizes, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)), no_room=no_room)


def _losses(rng: random.Random, at_s: float, sizes: Schedule) -> list[AnyFault]:
    """All holders of a shard, at once or while newcomers start; and what may come with it."""
    shard, later_s = rng.randrange(4), round(at_s + rng.uniform(0.1, 4.0), 3)
    last = [KillHolders(at_s=at_s, shard=shard)]
    if rng.random() < 0.5:
        last = [KillHolders(at_s=at_s, shard=shard, spared=1), KillHolders(at_s=later_s, shard=shard)]
    with_it: list[AnyFault] = []
    if rng.random() < 0.4:
        with_it.append(Damage(at_s=round(at_s + rng.uniform(-0.5, 0.5), 3)))
    if rng.random() < 0.2:
        with_it.append(DiskFull(at_s=round(max(0.0, at_s - 1.5), 3), for_s=rng.choice((0.5, 2.0))))
    if rng.random() < 0.6:
        more = rng.choice((_kills, _kills, _stores, _nets))
        with_it.append(more(rng, round(later_s + rng.uniform(-0.3, 1.5), 3), sizes))
    return [*last, *with_it]


def _faults(rng: random.Random, sizes: Schedule) -> tuple[AnyFault, ...]:
    """Half of them follow close upon another one: into its recovery."""
    theme = rng.choice((_kills, _kills, _kills, _nets, _stores, _mixed, _mixed)) if sizes.nodes > 1 else _kills
    horizon_s = 2.0 + 1.2 * sizes.steps
    faults: list[AnyFault] = []
    at_s = rng.uniform(0.1, horizon_s)
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        faults.append(theme(rng, round(at_s, 3), sizes))
        close = rng.random() < 0.5
        at_s = at_s + rng.uniform(0, 2.5) if close else rng.uniform(0.1, horizon_s)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _notices(rng: random.Random, sizes: Schedule) -> list[AnyFault]:
    """One node is told to go, or several: one after the other, or all at the same time."""
    horizon_s, again = 4.0 + 1.2 * sizes.steps, rng.choice((None, 0.5, 4.0))
    at_s, many = rng.uniform(3.5, horizon_s), rng.choice((1, 1, 2, sizes.nodes))
    close = rng.choice((0.0, 0.3, 3.0)) if many == sizes.nodes else 3.0
    return [Preempt(at_s=round(at_s + i * close, 3), node=rng.randrange(8), again_s=again) for i in range(many)]


def _kills(rng: random.Random, at_s: float, sizes: Schedule) -> AnyFault:
    who, again_s = rng.randrange(8), rng.choice((None, round(rng.uniform(0, 5), 2)))
    kind = rng.randrange(12)
    if kind < 5:
        phase = rng.choice(("", *_PHASES))
        return Kill(at_s=at_s, who=who, phase=phase, sends=rng.choice((0, 0, 0, 1, 2, 5)))
    if kind == 5:
        return Raise(at_s=at_s, who=who)
    if kind == 6:
        return KillHolders(at_s=at_s, shard=who % 4, spared=rng.choice((0, 1, 1, 1)))
    if kind < 10 and sizes.nodes > 1:
        silent, agent_only = rng.random() < 0.3 and not sizes.one_host, rng.random() < 0.2
        return KillNode(at_s=at_s, node=who, again_s=again_s, is_silent=silent, agent_only=agent_only)
    if kind == 10 and sizes.nodes > 1:
        return rng.choice((Join(at_s=at_s), Misfit(at_s=at_s)))
    if kind == 11 and sizes.nodes > 1 and rng.random() < 0.3:
        return KillAll(at_s=at_s, spread_s=rng.choice((0.0, 1.5)), again_s=again_s)
    return rng.choice((Stall(at_s=at_s, who=who, for_s=rng.choice((0.5, 4.0))), Kill(at_s=at_s, who=who)))


def _nets(rng: random.Random, at_s: float, sizes: Schedule) -> AnyFault:
    who, other, for_s = (
        rng.randrange(8),
        rng.randrange(8),
        round(rng.choice((0.4, 2.0, 4.0, 9.0)) * rng.uniform(0.5, 1.5), 2),
    )
    kind = rng.randrange(8)
    if kind < 3:
        return Cut(at_s=at_s, node=who, other=other, for_s=for_s, both=rng.random() < 0.7)
    if kind == 3:
        return Isolate(at_s=at_s, node=who, for_s=for_s, store=rng.random() < 0.5)
    if kind == 4:
        return Pause(at_s=at_s, who=who, for_s=for_s, is_node=rng.random() < 0.5)
    if kind == 5:
        return Slow(at_s=at_s, node=who, other=other, factor=rng.choice((20.0, 200.0)), for_s=for_s)
    if kind == 6 and not sizes.one_host:
        return Reset(at_s=at_s, who=who, other=other)
    return Pause(at_s=at_s, who=who, for_s=for_s)


def _stores(rng: random.Random, at_s: float, sizes: Schedule) -> AnyFault:
    for_s = round(rng.choice((0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5), 2)
    kind = rng.randrange(8)
    if kind < 2:
        return StoreAway(at_s=at_s, for_s=for_s, restarts=rng.random() < 0.5)
    if kind == 2:
        return StoreTorn(at_s=at_s, for_s=for_s)
    if kind == 3:
        return Compact(at_s=at_s)
    if kind == 4:
        return Wipe(at_s=at_s, for_s=rng.choice((0.1, 1.0, 4.0)))
    if kind == 5:
        return Cut(at_s=at_s, node=rng.randrange(8), other=-1, for_s=for_s)
    return _kills(rng, at_s, sizes)


def _mixed(rng: random.Random, at_s: float, sizes: Schedule) -> AnyFault:
    return rng.choice((_kills, _kills, _nets, _stores))(rng, at_s, sizes)
