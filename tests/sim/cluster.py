"""A whole job under one seeded scheduler: members, ordered links, an agent that edits the view, and faults.

Nothing here is concurrent: every choice (which message, which computation, which crash, when) comes from one generator,
so a seed replays a schedule exactly.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastrain import protocol as p
from elastrain.lifecycle import Lifecycle
from elastrain.messages import Contribution
from elastrain.recovery import Shape, ShardShape
from elastrain.world import Member, View
from tests.sim.member import Outbox, SimMember, Violation


@dataclass(frozen=True, kw_only=True)
class Scenario:
    members: int = 3
    nodes: int = 0
    """Simulated nodes; 0: one per member."""
    steps: int = 4
    runs: int = 4
    backups: int = 1
    crashes: int = 0
    zombies: int = 0
    joins: int = 0
    isolated: bool = False


def shape_of(scenario: Scenario) -> Shape:
    """Three blocks of two shards, and a weight shared by the first and the last block."""
    shards = [ShardShape(size_bytes=8 + s, lanes=(s // 2,)) for s in range(6)]
    shards.append(ShardShape(size_bytes=8, lanes=(0, 2)))
    return Shape(runs=scenario.runs, blocks=3, shards=tuple(shards), backups=scenario.backups)


@dataclass
class Truth:
    """What an undisturbed job of one computes: parameter digest and record content per step."""

    digests: dict[int, int] = field(default_factory=dict)
    told: dict[int, tuple[Contribution, float]] = field(default_factory=dict)


class Cluster:
    def __init__(self, scenario: Scenario, seed: int, truth: Truth | None, core: type[Lifecycle] = Lifecycle) -> None:
        self.scenario = scenario
        self.rng = random.Random(seed)
        self.shape = shape_of(scenario)
        self.core = core
        self.truth = truth
        self.seen = Truth()
        self.members: dict[str, SimMember] = {}
        self.dead: set[str] = set()
        self.asleep: dict[str, int] = {}
        self.cut_off: set[str] = set()
        self.evicted: set[str] = set()
        self.finished: set[str] = set()
        self.lost = ""
        self.ended = False
        self.links: dict[tuple[str, str], deque[p.Arrived]] = defaultdict(deque)
        self.views: dict[str, deque[View]] = defaultdict(deque)
        self.loops: dict[str, deque[Callable[[], p.Event]]] = defaultdict(deque)
        self.agent_todo: deque[Callable[[], None]] = deque()
        self.ticks = 0
        self.committed = -1
        first = [self._start() for _ in range(scenario.members)]
        self.view = View(generation=1, members=tuple(first), reason="start")
        self._tell(self.view)
        self.faults = self._draw_faults()

    # ---------------------------------------------------------------------------------------------------------- set-up

    def _start(self) -> Member:
        name = f"m{len(self.members)}"
        nodes = self.scenario.nodes or 10**9
        member = Member(id=name, node=f"n{len(self.members) % nodes}")
        self.members[name] = SimMember(name, self.shape, self.core)
        return member

    def _draw_faults(self) -> list[tuple[int, str]]:
        kinds = ["crash"] * self.scenario.crashes + ["zombie"] * self.scenario.zombies
        kinds += ["join"] * self.scenario.joins + ["isolate"] * self.scenario.isolated
        horizon = 60 * self.scenario.members * self.scenario.steps
        return sorted((self.rng.randrange(20, horizon), kind) for kind in kinds)

    def _tell(self, view: View) -> None:
        for name in self.members:
            if name not in self.dead and name not in self.cut_off:
                self.views[name].append(view)

    # ------------------------------------------------------------------------------------------------------- schedule

    def run(self, limit: int = 60_000) -> None:
        """Run to the end. Raises Violation if an invariant breaks or the job does not end."""
        while self.ticks < limit:
            self.ticks += 1
            self._strike()
            choices = self._choices()
            if not choices:
                break
            self.rng.choice(choices)()
        self._check_end()

    def _choices(self) -> list[Callable[[], None]]:
        live = [m for m in self.members if self._acts(m)]
        found: list[Callable[[], None]] = []
        for (source, to), queue in self.links.items():
            if queue and self._acts(to):
                found.append(lambda k=(source, to): self._deliver(k))  # type: ignore[misc]
        for name in live:
            if self.views[name]:
                found.append(lambda n=name: self._feed(n, p.Viewed(view=self.views[n].popleft())))  # type: ignore[misc]
            if self.loops[name]:
                found.append(lambda n=name: self._feed(n, self.loops[n].popleft()()))  # type: ignore[misc]
            if self.members[name].behind:
                found.append(lambda n=name: self._behind(n))  # type: ignore[misc]
        if self.agent_todo:
            found.append(lambda: self.agent_todo.popleft()())
        return found or self._wake_someone()

    def _wake_someone(self) -> list[Callable[[], None]]:
        """Nothing else can happen: sleepers wake, and faults whose time has not come strike now."""
        if self.asleep:
            return [lambda: self.asleep.pop(next(iter(self.asleep)), None) and None]
        return []

    def _acts(self, name: str) -> bool:
        return name not in self.dead and name not in self.finished and name not in self.asleep

    def _deliver(self, key: tuple[str, str]) -> None:
        arrival = self.links[key].popleft()
        if key[0] in self.cut_off or key[1] in self.cut_off:
            return
        self._feed(key[1], arrival)

    def _behind(self, name: str) -> None:
        out = self.members[name].work_behind()
        if out is not None:
            self._take(name, out)

    def _feed(self, name: str, event: p.Event) -> None:
        try:
            self._take(name, self.members[name].handle(event))
        except Violation:
            if name in self.view:
                raise
            self.finished.add(name)  # a member that was removed may read what others have released: nobody listens

    # ------------------------------------------------------------------------------------------------------- outcomes

    def _take(self, name: str, out: Outbox) -> None:
        member = self.members[name]
        generation = member.core.view.generation if member.core.view else 0
        for to, message, payload in out.frames:
            self.links[name, to].append(p.Arrived(source=name, generation=generation, message=message, payload=payload))
        if out.read_view:
            self.agent_todo.append(lambda: self.views[name].append(self.view))
        for step, run in out.compute:
            self._compute(name, step, run)
        for advance in out.advanced:
            self._advanced(name, advance)
        for enter in out.entered:
            self._enter(name, enter.step)
        for failure in out.failed:
            self._failed(name, failure)
        if out.left:
            self.finished.add(name)
            if out.evicted:
                self.evicted.add(name)
            elif not self.ended:
                self.ended = True
                for other in self.members:
                    self.loops[other].appendleft(lambda: p.Ended())

    def _compute(self, name: str, step: int, run: int) -> None:
        member = self.members[name]
        grads, told = member.gradient_of_run(step, run), member.contribution_of_run(step, run)
        for block in reversed(range(self.shape.blocks)):
            self.loops[name].append(lambda b=block: member.finish_block(step, run, b, grads, told))  # type: ignore[misc]
        self.loops[name].append(lambda: p.Ready())

    def _enter(self, name: str, step: int) -> None:
        member = self.members[name]
        if step >= self.scenario.steps:
            self.loops[name].append(lambda: member.begin(step))
            self.loops[name].append(lambda: p.Finishing(step=step))
        else:
            self.loops[name].append(lambda: member.begin(step))
            self.loops[name].append(lambda: p.Ready())

    def _advanced(self, name: str, advance: p.Advance) -> None:
        step, record = advance.record.step, advance.record
        digest = self.members[name].digest()
        if self.truth is not None and name not in self.evicted:
            if digest != self.truth.digests[step]:
                raise Violation(f"{name}: parameters after step {step} differ from the undisturbed job")
            if (record.contribution, record.square_norm) != self.truth.told[step]:
                raise Violation(f"{name}: the record of step {step} differs from the undisturbed job")
        self.seen.digests[step] = digest
        self.seen.told[step] = (record.contribution, record.square_norm)
        self.committed = max(self.committed, step)
        self._enter(name, step + 1)

    def _failed(self, name: str, failure: p.Fail) -> None:
        if name not in self.view:  # a member that was removed says what it likes
            self.finished.add(name)
            return
        if failure.kind != "StateLostError":
            raise Violation(f"{name}: {failure.reason}")
        holders = [core.core.base for n, core in self.members.items() if n in self.view and core.core.base]
        newest = max(
            (m.core for n, m in self.members.items() if n in self.view and m.core.base), key=lambda c: c.committed
        ).base
        assert holders
        assert newest is not None
        if all(set(h.all) & set(self.view.ids) for h in newest):
            raise Violation(f"{name} reports lost state although every shard has a living holder: {failure.reason}")
        self.lost = failure.reason

    # ---------------------------------------------------------------------------------------------------------- faults

    def _strike(self) -> None:
        while self.faults and self.faults[0][0] <= self.ticks:
            _, kind = self.faults.pop(0)
            if kind == "join":
                self._join()
                continue
            victims = [m for m in self.view.ids if self._acts(m) and m not in self.cut_off]
            if len(victims) < 2 or self.committed < 0 or self.finished:
                continue
            victim = self.rng.choice(victims)
            if kind == "crash":
                self.dead.add(victim)
                for to in self.members:  # what was under way may or may not arrive
                    keep = self.rng.randint(0, len(self.links[victim, to]))
                    self.links[victim, to] = deque(list(self.links[victim, to])[:keep])
            elif kind == "zombie":
                self.asleep[victim] = self.ticks
            else:
                self.cut_off.add(victim)
            self.agent_todo.append(lambda v=victim: self._remove(v))  # type: ignore[misc]

    def _remove(self, victim: str) -> None:
        rest = tuple(m for m in self.view.members if m.id != victim)
        if rest and victim in self.view:
            self.view = View(generation=self.view.generation + 1, members=rest, reason=f"{victim} lost")
            self._tell(self.view)

    def _join(self) -> None:
        if self.committed < 0 or self.finished:
            return
        newcomer = self._start()

        def enter() -> None:
            if not self.finished:
                self.view = View(
                    generation=self.view.generation + 1, members=(*self.view.members, newcomer), reason="join"
                )
                self._tell(self.view)

        self.agent_todo.append(enter)

    # ----------------------------------------------------------------------------------------------------------- ending

    def _check_end(self) -> None:
        if self.lost:
            return
        waiting = [m for m in self.view.ids if m not in self.finished and m not in self.dead]
        if waiting:
            raise Violation(f"stuck after {self.ticks} events: {self._where(waiting)}")

    def _where(self, names: list[str]) -> str:
        parts: list[Any] = []
        for name in names:
            core = self.members[name].core
            generation = core.view.generation if core.view else None
            parts.append(
                f"{name} gen={generation} committed={core.committed} begun={core.begun} recovering={core.recovering} "
                f"pending={core.attempt.pending} voted={core.attempt.voted}"
            )
        return "; ".join(parts)


def truth_of(scenario: Scenario) -> Truth:
    """The undisturbed job of one."""
    alone = Scenario(members=1, steps=scenario.steps, runs=scenario.runs, backups=scenario.backups)
    cluster = Cluster(alone, 0, None)
    cluster.run()
    if set(cluster.seen.digests) != set(range(scenario.steps)):
        raise Violation("the undisturbed job did not end")
    return cluster.seen
