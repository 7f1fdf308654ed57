"""A whole job under one seeded scheduler: members, ordered links, an agent that edits the view, and faults.

Nothing here is concurrent: every choice (which message, which computation, which crash, when) comes from one generator,
so a seed replays a schedule exactly. What must hold meanwhile stands in checks.py.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elastrain import protocol as p
from elastrain.decisions.membership import HoldersByShard, Outcome, propose, with_step_anew
from elastrain.job.checkpoint_plan import CheckpointPlan
from elastrain.job.placement import Placement
from elastrain.job.scaling import LossScale
from elastrain.job.values import AuditPlan, Check, Initial, Report, Shape, ShardShape, Vote
from elastrain.job.world import Member, View
from elastrain.protocol.messages import (
    Ack,
    AskPlan,
    Digests,
    Gradient,
    Partial,
    Publish,
    ShardCopy,
    TellPlan,
)
from elastrain.protocol.move_messages import ShadowPiece
from tests.sim.checks import Checks, Truth, content
from tests.sim.evaluating import EvaluatingScript
from tests.sim.member import Outbox, Run, SimMember, Violation
from tests.sim.pipelined import TRACED, PipelinedLoop, TaskRun, any_plan, micro_batches_of, pipelining_of
from tests.sim.symbols import State

DEATHS = (object, Report, Partial, Gradient, Ack, Vote, Publish, Publish, Digests, ShardCopy)
# Drawn in jobs with planners only, so that all other schedules stay what they are.
PLAN_DEATHS = (*DEATHS, AskPlan, TellPlan, TellPlan, ShadowPiece, ShadowPiece)
Choice = tuple[Any, Callable[[Any], None], Any]
"""(what is slow or not, what to do, with what)."""


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
    hunts: int = 0
    """Times that all but one holder of some shard die at once, as soon as the job is redundant: never a loss."""
    pairs: int = 0
    """Times that two members die in one step while they hand over what they have summed."""
    stalls: int = 0
    """Times that somebody's training loop stands still in the middle of a run, while all else goes on."""
    unread: int = 0
    """Times that a backward begins anew, in another slot, because a drive did not give back activations."""
    drifts: int = 0
    """Times that somebody's scheduler is stepped otherwise than the others': never a commit."""
    flips: int = 0
    heirs: int = 0
    """Primaries that die while a bit changes in what a backup of theirs keeps: it must not take over with that."""
    """Bits that change in somebody's memory, or in what it computes or copies behind."""
    lone: int = 0
    """Bits that change in a state of the only member, once it has committed a step alone."""
    resumes: int | None = None
    """The step after which the checkpoint stands that the job starts from; None: it starts anew."""
    early: bool = False
    """Faults strike from the first moment on: most of them before the first commit."""
    trapped: bool = False
    """Crashes hit whoever publishes next: mostly the first to pass a step, while nobody else has."""
    budget_bytes: int = 1 << 20
    """How much may be on its way at a time; the shards have 8 to 13 bytes."""
    audit: AuditPlan = field(default_factory=AuditPlan)
    slips: int = 0
    """Gradients that one member computes wrongly; each costs the step one more try."""
    check_every: int = 0
    """Members check each other in every so many steps, and in the first one."""
    carries: bool = False
    """Forwards depend on how many there were before: members have to notice that they differ."""
    noisy: bool = False
    """Whoever computes a run again gets other bits."""
    slow: float = 0.0
    """Share of links, loops and background workers that nearly stand still."""
    stops: int = 0
    """Members whose training loop is left in the middle of the job."""
    slow_behind: bool = False
    """Work that nobody waits for takes longer than any run."""
    device: bool = False
    """Loops get their next run while their device still works on the present one: its results come later."""
    run_length: int = 0
    """Micro-batches of a run, each of which goes through the model along a chain; 0: runs are wholes."""
    stages: int = 0
    """Members per pipeline; 0: none are made."""
    narrow: float = 0.0
    """Share of members whose memory limits leave no room for all blocks at the end."""
    refuses: float = 0.0
    """Share of the copies for which new backups have no room."""
    small: bool = False
    """Two shards in one block."""
    plans: bool = False
    """Members tell how long their blocks take, and are answered with any plan: late, twice or never."""
    standing: bool = False
    """Members keep blocks that only one other member computes."""
    speeds: bool = False
    """Members tell how long their micro-batches take, in each step as long as it comes."""
    checkpoint_every: int = 0
    """Every so many steps become durable checkpoints."""
    local_disks: bool = False
    """Every holder writes its copy."""
    wishes: int = 0
    """Times that somebody's script asks for a checkpoint."""
    fetches: float = 0.0
    """Share of the steps before which a member's script asks for the whole optimizer state."""
    evaluations: int = 0
    """Most evaluations in a place where a script may have some: before the micro-batches of a step, and behind them."""
    broadcasts: float = 0.0
    """Part of these that are broadcasts."""
    full_disks: int = 0
    """Members whose disk takes nothing any more, from some moment on."""

    @property
    def plan(self) -> CheckpointPlan:
        return CheckpointPlan(every_steps=self.checkpoint_every, all_holders=self.local_disks)


LANDS = (p.BlockDone, p.Checked, p.Computed, p.Ready)
"""Events of a loop on a device that come when the device has finished what they tell of."""
FROZEN = frozenset([7])
"""Shards without a gradient."""


_SMALL = ShardShape(size_bytes=8, lanes=(0,))


def shape_of(scenario: Scenario) -> Shape:
    """A block without shards, three of two; a weight shared by the first and the last of them; a frozen shard."""
    if scenario.small:
        return Shape(runs=scenario.runs, blocks=1, shards=(_SMALL, _SMALL), backups=scenario.backups)
    shards = [ShardShape(size_bytes=8 + s, lanes=(1 + s // 2,)) for s in range(6)]
    shards += [ShardShape(size_bytes=8, lanes=(1, 3)), ShardShape(size_bytes=8, lanes=(2,))]
    scaling = LossScale(initial=16.0, growth_interval=1)  # it moves in every step
    return Shape(
        runs=scenario.runs,
        blocks=4,
        shards=tuple(shards),
        backups=scenario.backups,
        loss_scale=scaling,
        deterministic=not scenario.noisy,
        cross_check_every=scenario.check_every,
        audit=scenario.audit,
        pipelining=pipelining_of(scenario.stages, scenario.runs, scenario.run_length, has_standing=scenario.standing),
    )


def initial_of(resumes: int | None, truth: Truth | None) -> Initial:
    """The state after the step `resumes` of the undisturbed job; None: that which members make."""
    if resumes is None:
        return Initial()
    if resumes < 0:
        return Initial(is_stored=True)
    assert truth is not None
    return Initial(step=resumes, is_stored=True, scaler=truth.next_scaler(resumes))


@dataclass(eq=False)
class Part:
    """A part of a run in some training loop; parts differ in speed."""

    run: Run
    name: str
    act: Callable[[], p.Event | None]

    def __call__(self) -> p.Event | None:
        return self.act()


class Cluster:
    def __init__(self, scenario: Scenario, seed: int, truth: Truth | None) -> None:
        self.scenario = scenario
        self.seed, self.rng = seed, random.Random(seed)
        self.shape = replace(shape_of(scenario), initial=initial_of(scenario.resumes, truth))
        self.truth = truth
        self.seen = Truth()
        self.tell: Callable[[str], None] | None = None
        """Takes the lines of the transcript, if anybody wants it."""
        self.members: dict[str, SimMember] = {}
        self.dead: set[str] = set()
        self.doomed: dict[str, type] = {}
        """They die when they next send such a message (object: any), with all or a part of that event's frames sent."""
        self.trap: list[type] = []
        """Whoever is the next, and so often the first, to send such a message dies of it."""
        self.asleep: dict[str, int] = {}
        """Paused member -> the tick at which it wakes."""
        self.cut_off: dict[str, int] = {}
        """Isolated member -> the tick at which it is reached again."""
        self.removed: list[str] = []
        self.finished: set[str] = set()
        self.lost = ""
        self.diverged = ""
        self.flipped: set[str] = set()
        """Members in whose memory a bit has changed."""
        self.slipped: set[str] = set()
        """Members that have computed a wrong gradient."""
        self.wrong: dict[str, str] = {}
        """Members that left a step with parameters that no undisturbed job has."""
        self.ended = False
        self.struck = 0
        self.links: dict[tuple[str, str], deque[p.Arrived]] = defaultdict(deque)
        self.views: dict[str, deque[View]] = defaultdict(deque)
        self.loops: dict[str, deque[Callable[[], p.Event | None]]] = defaultdict(deque)
        self.asks: dict[str, deque[p.Event]] = defaultdict(deque)
        """Loops on a device that have submitted their run: they ask for the next one."""
        self.landing: dict[str, deque[p.Event]] = defaultdict(deque)
        """Results that a device has computed and its member has not heard of."""
        self.stalling: set[str] = set()
        """Members whose training loop will stand still in the middle of a run."""
        self.stalled: dict[str, int] = {}
        """Those that do -> the tick at which it goes on."""
        self.unread: set[str] = set()
        """Members whose next backward does not get back what was saved for it."""
        self.manifests: dict[str, deque[p.WriteManifest]] = defaultdict(deque)
        """Checkpoints of which all parts are written, until the store has been asked."""
        self.planning: dict[str, list[p.Planned]] = defaultdict(list)
        """Answers of each member's planner that it has not heard."""
        self.evaluations: dict[str, EvaluatingScript] = {}
        self.agent_todo: deque[Callable[[], None]] = deque()
        self.joining: list[Member] = []
        self.slowness: dict[Any, bool] = {}
        self.checks = Checks(self.shape, truth, self.members, self.dead)
        self.checks.may_refuse = scenario.refuses > 0
        self.checks.flipped = self.flipped
        self.checks.only_joins = not (
            scenario.crashes
            + scenario.zombies
            + scenario.isolated
            + scenario.hunts
            + scenario.pairs
            + scenario.flips
            + scenario.heirs
            + scenario.slips
            + scenario.stops
        )
        self.ticks = 0
        self.committed = self.shape.initial.step
        self.view = View(generation=1, members=tuple(self._start() for _ in range(scenario.members)), reason="start")
        self._tell_view()
        self.faults = self._draw_faults()

    # ---------------------------------------------------------------------------------------------------------- set-up

    def _start(self) -> Member:
        name = f"m{len(self.members)}"
        nodes = self.scenario.nodes or 10**9
        member = Member(id=name, node=f"n{len(self.members) % nodes}")
        self.members[name] = SimMember(
            name, self.shape, self.scenario.budget_bytes, frozen=FROZEN, checkpoints=self.scenario.plan
        )
        if self.shape.initial.is_stored and self.truth is not None:
            self.members[name].symbols.stored = self.truth.stored(self.shape)
        if self.scenario.speeds:
            self.members[name].seconds = random.Random(f"speed of {name} {self.seed}")
        if self.scenario.run_length:
            length = self.scenario.run_length
            micro_batches = micro_batches_of(self.scenario.runs, length)
            loop = self.members[name].pipelined = PipelinedLoop(self.members[name], length, micro_batches)
            loop.seconds = random.Random(f"seconds {name} {self.seed}") if self.scenario.plans else None
        if random.Random(f"{name} {self.seed}").random() < self.scenario.narrow:
            budget_bytes = self.scenario.budget_bytes
            self.members[name].core.handle(p.CopyBudgetSet(parameters_bytes=budget_bytes, has_room_for_all=False))
        if self.scenario.refuses:
            self.members[name].room = random.Random(f"room of {name} {self.seed}")
            self.members[name].refuses = self.scenario.refuses
        self.members[name].watch = self.checks.command
        self.evaluations[name] = EvaluatingScript(self, name)
        self.members[name].noise = name if self.scenario.noisy else ""
        self.members[name].carries = self.scenario.carries
        return member

    def _draw_faults(self) -> list[tuple[int, str]]:
        """Half of the faults follow close upon another one: into its recovery."""
        drawn = self.scenario
        kinds = ["crash"] * drawn.crashes + ["zombie"] * drawn.zombies + ["join"] * drawn.joins
        kinds += ["isolate"] * drawn.isolated + ["hunt"] * drawn.hunts + ["flip"] * drawn.flips
        kinds += ["heir"] * drawn.heirs
        kinds += ["lone"] * drawn.lone
        kinds += ["stall"] * drawn.stalls + ["unread"] * drawn.unread + ["drift"] * drawn.drifts
        kinds += ["slip"] * drawn.slips
        kinds += ["pair"] * drawn.pairs + ["wish"] * drawn.wishes + ["full"] * drawn.full_disks
        self.rng.shuffle(kinds)
        horizon = 22 * drawn.members * drawn.steps + 21  # about as long as the job takes undisturbed
        times: list[int] = []
        for _ in kinds:
            close = times and self.rng.random() < 0.5
            first, last = (0, 30 * drawn.members) if drawn.early else (20, horizon)
            times.append(times[-1] + self.rng.randrange(60) if close else self.rng.randrange(first, last))
        return sorted(zip(times, kinds, strict=True))

    def _tell_view(self) -> None:
        self._say(f"view {self.view.generation}:", *self.view.ids, f"({self.view.reason})")
        for name in self.members:
            if name not in self.dead and name not in self.cut_off:
                self.views[name].append(self.view)

    def _say(self, *parts: object) -> None:
        if self.tell is not None:
            self.tell(f"{self.ticks:6}  " + " ".join(part if isinstance(part, str) else _short(part) for part in parts))

    # ------------------------------------------------------------------------------------------------------- schedule

    def run(self, limit: int = 60_000) -> None:
        """Run to the end. Raises Violation if an invariant breaks or the job does not end."""
        while self.ticks < limit and not self.diverged and not self.lost:
            self.ticks += 1
            self._strike()
            choices = self._choices()
            if choices:
                _, act, argument = self._choose(choices)
                act(argument)
            elif not self._wake_someone():
                break
        self._check_end()

    def _choices(self) -> list[Choice]:
        found: list[Choice] = []
        for key, queue in self.links.items():
            if queue and self._acts(key[1]) and key[0] not in self.cut_off and key[1] not in self.cut_off:
                found.append((key, self._deliver, key))
        for name, member in self.members.items():
            if not self._acts(name):
                continue
            if self.views[name]:
                found.append((("view", name), self._view, name))
            if self.asks[name]:
                found.append((("ask", name), self._ask, name))
            if self.landing[name]:
                found.append((("landing", name), self._land, name))
            if self.loops[name] and name not in self.stalled and self._is_submitted(name):
                found.append((("loop", name, getattr(self.loops[name][0], "name", "")), self._loop, name))
            if member.core.copying.takers:
                found.append((("copies", name), self._copy, name))
            if member.has_work_behind:
                found.append((("behind", name), self._behind, name))
            if member.reads:
                found.append((("read", name), self._read, name))
            if self.planning[name]:
                found.append((("planner", name), self._answer, name))
            if member.disk.has_work:
                found.append((("disk", name), self._write, name))
            if self.manifests[name] and name not in self.cut_off:
                found.append((("manifest", name), self._publish, name))
        if self.agent_todo:
            found.append(("agent", lambda _: self.agent_todo.popleft()(), None))
        return found

    def _choose(self, choices: list[Choice]) -> Choice:
        choice = self.rng.choice(choices)
        if choice[0][0] in ("manifest", "planner") and self.rng.random() < 0.9:  # a disk and a store; a long search
            choice = self.rng.choice(choices)
        if self.scenario.slow or self.scenario.slow_behind:
            for _ in range(12):
                if not self._is_slow(choice[0]):
                    break
                choice = self.rng.choice(choices)
        return choice

    def _is_slow(self, key: Any) -> bool:
        if key not in self.slowness:
            behind = self.scenario.slow_behind and key[0] == "behind"
            self.slowness[key] = behind or self.rng.random() < self.scenario.slow
        return self.slowness[key]

    def _acts(self, name: str) -> bool:
        return name not in self.dead and name not in self.finished and name not in self.asleep

    def _wake_someone(self) -> bool:
        """Nothing else can happen: what was silent comes back now."""
        for silent in (self.stalled, self.asleep, self.cut_off):
            for name in silent:
                if name not in self.dead and name not in self.finished:
                    self._come_back(name)
                    return True
        return False

    def _deliver(self, key: tuple[str, str]) -> None:
        self._feed(key[1], self.links[key].popleft())

    def _view(self, name: str) -> None:
        self._feed(name, p.Viewed(view=self.views[name].popleft()))

    def _loop(self, name: str) -> None:
        event = self.loops[name].popleft()()
        if event is not None and self.scenario.device and isinstance(event, LANDS):
            self.landing[name].append(event)
        elif event is not None:
            self._feed(name, event)

    def _is_submitted(self, name: str) -> bool:
        """A device ends a run only when its loop has submitted all of it, and so has asked for the next one."""
        loop = self.loops[name]
        return not self.asks[name] or loop[0] is not p.Ready or loop.count(p.Ready) > 1

    def _ask(self, name: str) -> None:
        self._feed(name, self.asks[name].popleft())

    def _land(self, name: str) -> None:
        self._feed(name, self.landing[name].popleft())

    def _answer(self, name: str) -> None:
        """Any of the answers: they may come in another order than the questions."""
        self._feed(name, self.planning[name].pop(self.rng.randrange(len(self.planning[name]))))

    def _read(self, name: str) -> None:
        self._feed(name, self.members[name].read_initial())

    def _copy(self, name: str) -> None:
        self._feed(name, p.CopiesAllowed(parameters_bytes=self.rng.choice((1, 20, 1 << 20))))

    def _behind(self, name: str) -> None:
        self._say(f"{name} works behind")
        out = self.members[name].work_behind()
        if out is not None:
            self._take(name, out)

    def _write(self, name: str) -> None:
        self._feed(name, self.members[name].disk.write())

    def _publish(self, name: str) -> None:
        """The agent puts a record in the store, and the checkpoint becomes visible."""
        command = self.manifests[name].popleft()
        refused = self._may_put_record(name)
        if not refused:
            self.checks.durable(self.members[name], command)
        step = command.record.step
        told = f"manifest of {step}" if self.scenario.local_disks and not refused else ""
        self._feed(name, p.ManifestWritten(step=step, reason=refused, told=told))

    def _may_put_record(self, name: str) -> str:
        """Empty if it may: the store compares the generation."""
        generation = self.members[name].generation
        return "" if generation == self.view.generation else f"generation {generation} is over"

    def _feed(self, name: str, event: p.Event) -> None:
        self._say(name, "<-", event)
        try:
            self._take(name, self.members[name].handle(event))
        except Violation:
            if name in self.view:
                raise
            self.finished.add(name)  # a member that was removed may read what others have released: nobody listens

    # ------------------------------------------------------------------------------------------------------- outcomes

    def _take(self, name: str, out: Outbox) -> None:
        member = self.members[name]
        dies = self._dies_of(name, out)
        part = dies and self.rng.random() < 0.7
        sent = out.frames[: self.rng.randint(0, len(out.frames))] if part else out.frames
        for to, generation, message, payload in sent:
            self._say("   ", name, "->", to, message)
            self.links[name, to].append(p.Arrived(source=name, generation=generation, message=message, payload=payload))
        if dies:
            self.checks.forget_fresh()  # what only the dead have passed is not committed
            self._die(name)
            return
        self.checks.event(member)
        for wish in out.anew:
            self._say(f"    {name} wants the step anew: {wish.reason}")
            self.agent_todo.append(lambda wish=wish: self._begin_anew(wish))  # type: ignore[misc]
        if out.read_view:
            self.agent_todo.append(lambda: self.views[name].append(self.view))
        for question in out.questions:
            # Never, once or twice.
            self.planning[name] += [any_plan(question, self.rng)] * self.rng.choice([0, 1, 1, 1, 2])
        for command in out.compute:
            self._compute(name, command)
        for advance in out.advanced:
            self._advanced(name, advance)
        for enter in out.entered:
            first = self.shape.initial.step + 1
            if enter.step > first and enter.state is None:
                raise Violation(f"{name} enters step {enter.step} without the others' loop state")
            self.members[name].enter(enter.state or str(first))  # what the checkpoint says of the loop
            self._enter(name, enter.step)
        for step, states in out.fetched:
            self._fetched(name, step, states)
        for given in out.evaluating:
            self.evaluations[name].take(given)
        self.manifests[name].extend(out.manifests)
        for failure in out.failed:
            self._failed(name, failure)
        if out.left:
            self._left(name, evicted=out.evicted)

    def _dies_of(self, name: str, out: Outbox) -> bool:
        sent = tuple({type(frame[2]) for frame in out.frames})
        if self.trap and _has(sent, self.trap[0]) and name in self.view and len(self._living()) > 1:
            self.trap.pop(0)
            return True
        return name in self.doomed and _has(sent, self.doomed[name])

    def _living(self) -> list[str]:
        return [m for m in self.view.ids if self._acts(m) and m not in self.cut_off and m not in self.doomed]

    def _left(self, name: str, *, evicted: bool) -> None:
        self._say(f"    {name} leaves{', evicted' if evicted else ''}")
        self.finished.add(name)
        if not evicted and self.shape.pipelining is not None:
            self._check_has_all(name)
        if not evicted and not self.ended:
            self._check_all_are_done(name)
            self.ended = True
            for other in self.members:
                self.loops[other].appendleft(p.JobEnded)

    def _check_has_all(self, name: str) -> None:
        """Who leaves has every block: scripts evaluate the whole model then."""
        member = self.members[name]
        if self.truth is None or self.flipped or member.machine.loop.is_outside:  # it came too late for the job
            return
        first = self.members[member.machine.views.view.ids[0]]
        if member.machine.end.keeps_own:
            its, after = member.parameters(), self.truth.after
            has = member.machine.commit.parameters.needed()
            if any(its[shard] != after(member.committed, shard) for shard in has):
                raise Violation(f"{name} leaves with other parameters than those of step {member.committed}")
            member = first
        if member.digest() != self.truth.digests.get(member.committed):
            raise Violation(f"{name} leaves without all parameters of step {member.committed}")

    def _check_all_are_done(self, name: str) -> None:
        """The end is a barrier: who has passed it frees all others, wherever they are."""
        member = self.members[name]
        if member.machine.checkpointing.open is not None:
            raise Violation(f"{name} leaves while a checkpoint is being written")
        has_over = member.machine.checkpointing.is_over(member.committed)
        if member.machine.end.is_checkpoint_wished and member.machine.commit.record is not None and not has_over:
            raise Violation(f"{name} leaves without the checkpoint of the last step that was asked for")
        end = self.scenario.steps if member.machine.end.step is None else member.machine.end.step
        for other in member.view.ids if member.view else ():
            if self.members[other].committed < end - 1:
                raise Violation(f"{name} leaves while {other} is still in step {self.members[other].committed + 1}")

    def _compute(self, name: str, run: Run | TaskRun | p.Recompute | p.WarmUp) -> None:
        if isinstance(run, p.WarmUp):
            self._say(f"    {name} warms up the blocks {run.places}")
            self.loops[name].extend((self.members[name].warmed_up, p.Ready))
            return
        self.members[name].forwards += 1
        if isinstance(run, TaskRun):
            self._act(name, run)
            return
        if isinstance(run, p.Recompute):
            self._say(f"    {name} checks run {run.run} of step {run.step}")
            self._check(name, run)
        else:
            self._say(f"    {name} computes run {run.compute.run} of step {run.compute.step}")
            self.loops[name].extend(self._parts(name, run))
            if run.compute.probed:
                self._check(name, run.compute)
            if run.compute.audited:
                self.loops[name].append(lambda: self._checked(run.compute, self.members[name].audited(run)))
        self.loops[name].append(p.Ready)
        if self.scenario.device:
            self.asks[name].append(p.Submitted())

    def _act(self, name: str, run: TaskRun) -> None:
        """A micro-batch through a task; what comes of it is told bit by bit."""
        command, loop = run.command, self.members[name].pipelined
        self._say(f"    {name}: {type(command).__name__} of {command.micro_batch} through {command.task}")
        assert loop is not None

        def act() -> None:
            told = loop.compute(run)
            self.loops[name].extendleft(lambda event=event: event for event in reversed(told))  # type: ignore[misc]

        self.loops[name].append(act)
        self.loops[name].append(p.Ready)
        if self.scenario.device:
            self.asks[name].append(p.Submitted())

    def _parts(self, name: str, run: Run) -> list[Part]:
        """Forward, then backward block by block from the last one."""
        blocks = reversed(range(self.shape.blocks))
        backward = [Part(run, f"block {b}", lambda b=b: self._backward(name, run, b)) for b in blocks]  # type: ignore[misc]
        return [Part(run, "forward", lambda: self.members[name].forward(run)), *backward]

    def _backward(self, name: str, run: Run, block: int) -> p.Event | None:
        if name in self.unread and run.reported:
            self.unread.discard(name)
            self._say(f"{name} computes run {run.compute.run} again")
            self.members[name].compute_again(run)
            rest = [part for part in self.loops[name] if getattr(part, "run", None) is not run]
            self.loops[name] = deque([*self._parts(name, run), *rest])
            return None
        if name in self.stalling and run.reported:
            self.stalling.discard(name)
            self._say(f"{name} stands still in run {run.compute.run}")
            self.stalled[name] = self.ticks + self.rng.choice([60, 300, 1000])
        return self.members[name].backward(run, block)

    def _check(self, name: str, command: p.Compute | p.Recompute) -> None:
        """What its first micro-batch comes to: the parameters are read until it is told."""
        member, step, run = self.members[name], command.step, command.run
        is_audit = isinstance(command, p.Recompute) and command.whole
        weights = member.digest()
        check = member.audit(command) if is_audit else member.check_of_run(step, run, command.loss_scale)

        def checked() -> p.Event:
            if member.digest() != weights and name in self.view and not self.flipped:
                raise Violation(f"the parameters of {name} changed while it computed run {run} of step {step}")
            return p.Checked(step=step, run=run, check=check, whole=is_audit)

        self.loops[name].append(checked)

    def _checked(self, compute: p.Compute, check: Check) -> p.Event:
        return p.Checked(step=compute.step, run=compute.run, check=check, whole=True)

    def _enter(self, name: str, step: int) -> None:
        member = self.members[name]
        if member.loop != step:
            raise Violation(f"the loop of {name} enters step {step} with the state of step {member.loop}")
        self.evaluations[name].run(step - 1, step, lambda: self._reach(name, step))

    def _reach(self, name: str, step: int) -> None:
        if random.Random(f"{name} {step} {self.seed}").random() < self.scenario.fetches:
            self.loops[name].append(p.StateWanted)  # the loop stands still until all states are there
        else:
            self._begin_step(name, step)

    def _fetched(self, name: str, step: int, states: Mapping[int, State]) -> None:
        truth = self.truth
        found = {shard: state.cell.value for shard, state in states.items()}
        if sorted(found) != list(range(len(self.shape.shards))):
            raise Violation(f"{name} gets the states of {sorted(found)} after step {step}, not those of all shards")
        if truth is not None and not self.flipped and any(found[s] != truth.after(step, s) for s in found):
            raise Violation(f"{name} gets other states after step {step} than the undisturbed job has")
        self._begin_step(name, step + 1)

    def _begin_step(self, name: str, step: int) -> None:
        member = self.members[name]
        self.loops[name].append(lambda: member.begin(step))
        if step >= self._end_of(name):
            self.loops[name].append(lambda: p.LoopEnded(step=step))
        else:
            if self.shape.pipelining is not None and member.machine.step.tracing.traced is None:
                self.loops[name].append(lambda: p.Traced(model=TRACED))
            self.loops[name].append(p.Ready)

    def _end_of(self, name: str) -> int:
        """The step before which the loop of this member is left."""
        is_left = int(name[1:]) < self.scenario.stops
        return self.scenario.steps // 2 if is_left else self.scenario.steps

    def _advanced(self, name: str, advance: p.Advance) -> None:
        step, record = advance.record.step, advance.record
        if record.plan is not None:
            self._leaves_in_pipelines(name, advance)
            return
        digest = self.members[name].digest()
        self._say(f"    {name} leaves step {step} with digest {digest:016x}")
        if self.truth is not None and digest != self.truth.digests[step]:
            self.wrong[name] = f"{name}: parameters after step {step} differ from the undisturbed job"
            # A new primary looks before it publishes: what has changed at an heir never gets to the others.
            if not self.flipped or (not self.scenario.flips and name not in self.flipped):
                raise Violation(self.wrong[name])
        else:
            self.wrong.pop(name, None)
        if self.scenario.noisy and self.seen.digests.get(step, digest) != digest:
            raise Violation(f"{name}: parameters after step {step} differ from those of another member")
        self.seen.digests[step] = digest
        self.seen.parameters[step] = self.members[name].parameters()
        self.seen.told[step] = content(record)
        self._enters_next(name, step)

    def _leaves_in_pipelines(self, name: str, advance: p.Advance) -> None:
        """It has the parameters of its own blocks only."""
        member, step = self.members[name], advance.record.step
        has = member.machine.commit.parameters.needed()
        self._say(f"    {name} leaves step {step} with shards {tuple(has)}")
        truth = self.truth
        if truth is not None and any(member.parameters()[shard] != truth.after(step, shard) for shard in has):
            self.wrong[name] = f"{name}: parameters after step {step} differ from the undisturbed job"
            if not self.flipped:
                raise Violation(self.wrong[name])
        else:
            self.wrong.pop(name, None)
        self._enters_next(name, step)

    def _enters_next(self, name: str, step: int) -> None:
        self.committed = max(self.committed, step)
        self.members[name].loop += 1
        self.evaluations[name].run(step, step, lambda: self._enter(name, step + 1))

    def _failed(self, name: str, failure: p.Fail) -> None:
        self._say(f"    {name} fails: {failure.kind}: {failure.reason}")
        if name not in self.view:  # a member that was removed says what it likes
            self.finished.add(name)
        elif "came out differently" in failure.reason and not (self.scenario.carries or self.flipped or self.slipped):
            raise Violation(f"a false alarm of {name}: {failure.reason}")
        elif failure.kind == "DivergedError" and self._is_expected(failure.reason):
            self.diverged = failure.reason
        elif failure.kind == "CorruptedError":
            if name not in self.flipped | self.slipped:
                raise Violation(f"{name} ends, although its memory is whole: {failure.reason}")
            self._die(name)
        elif failure.kind == "StoppedError" and self._end_of(name) < self.scenario.steps:
            self._die(name)
        elif failure.kind != "StateLostError":
            raise Violation(f"{name}: {failure.reason}")
        else:
            self._check_loss(name, failure.reason)
            self.lost = failure.reason

    def _is_expected(self, reason: str) -> bool:
        drifted = any(self.members[m].drift for m in self.view.ids) and "hyperparameters" in reason
        return drifted or bool(self.flipped) or self.scenario.carries

    def _check_loss(self, name: str, reason: str) -> None:
        """A shard may be lost only if nobody holds it, and the last who did was not sent away alive."""
        if not self._has_begun():
            raise Violation(f"{name} reports lost state before the first commit: {reason}")
        whole = set(self.view.ids) - self.flipped  # what has changed in memory is let go of
        gone = [h.all for h in self._newest_base() if not whole & set(h.all)]
        if not gone:
            raise Violation(f"{name} reports lost state although every shard has a living holder: {reason}")
        for holders in gone:
            if self.flipped & set(holders):
                continue
            last = max(holders, key=self.removed.index)
            if last not in self.dead:
                raise Violation(f"the last holder {last} of a shard was removed although it lives: {reason}")
        # Hunts leave every shard a holder, and know nothing of members that end because they were wrong twice.
        if self.scenario.hunts and not self.slipped & self.dead:
            raise Violation(f"no more members died at once than there are backups: {reason}")

    # ---------------------------------------------------------------------------------------------------------- faults

    def _strike(self) -> None:
        for silent in (self.asleep, self.cut_off, self.stalled):
            for name in [n for n, until in silent.items() if until <= self.ticks]:
                self._come_back(name)
        while self.faults and self.faults[0][0] <= self.ticks:
            _, kind = self.faults[0]
            early = (self.committed == self.shape.initial.step and not self.scenario.early) or (
                kind == "hunt" and not self._is_redundant()
            )
            if early and not self.finished:
                return  # and what was to follow, waits with it
            self.faults.pop(0)
            if kind == "join":
                self._join()
            elif kind == "hunt":
                self._hunt()
            elif kind == "pair":
                self._doom_two()
            elif kind == "heir":
                self._spoil_heir()
            elif kind == "lone":
                self._spoil_lone()
            elif kind == "wish":
                self._wish()
            else:
                self._hit(kind)

    def _hit(self, kind: str) -> None:
        victims = self._living()
        if len(victims) < 2 or self.finished:
            return
        faulty = {"flip": self.flipped, "slip": self.slipped}.get(kind)
        if faulty:  # one machine is: of two, the one may hide what the other does
            victims = [m for m in victims if m in faulty]
        if not victims:
            return
        victim = self.rng.choice(victims)
        self.struck += 1
        trapped = self.scenario.trapped
        if kind == "crash" and (trapped or self.rng.random() < 0.3):
            self.trap.append(Publish if trapped else self.rng.choice(PLAN_DEATHS if self.scenario.plans else DEATHS))
            self._say(f"FAULT trap {self.trap}")
            return
        self._say(f"FAULT {kind} {victim}")
        silent_until = self.ticks + self.rng.choice([10, 60, 300, 1 << 30])
        if kind == "flip":
            self.flipped.add(victim)
            self.members[victim].flip(self.rng)
        elif kind == "slip":
            self.slipped.add(victim)
            self.members[victim].slips += 1
        elif kind == "stall":
            self.stalling.add(victim)
        elif kind == "drift":
            self.members[victim].drift = " and more"
        elif kind == "full":
            self.members[victim].disk.is_full = True
        elif kind == "unread":
            self.unread.add(victim)
        elif kind == "crash" and self.rng.random() < 0.6:
            self.doomed[victim] = self.rng.choice(PLAN_DEATHS if self.scenario.plans else DEATHS)
        elif kind == "crash":
            self._die(victim)
        elif kind == "zombie":
            self.asleep[victim] = silent_until
            self.agent_todo.append(self._consider)
        else:
            self.cut_off[victim] = silent_until
            self.agent_todo.append(self._consider)

    def _spoil_heir(self) -> None:
        """Kill a primary, and flip a bit of what one of its backups keeps, a little before or after."""
        living = self._living()
        shards = enumerate(self.members[living[0]].roles.live) if living else ()
        pairs = [(h.primary, b, s) for s, h in shards for b in h.backups if {h.primary, b} <= set(living)]
        pairs = [(p, b, s) for p, b, s in pairs if s in self.members[b].states and self.flipped <= {b}]
        if not pairs or self.finished:
            return
        primary, heir, shard = self.rng.choice(pairs)
        self.struck += 1
        self._say(f"FAULT heir {heir} of shard {shard} of {primary}")
        self.flipped.add(heir)
        self.members[heir].flip_backup(self.rng, shard)
        self._die(primary)

    def _spoil_lone(self) -> None:
        """Flip a bit of what the only member has, in a view in which it has committed a step; or wait for that."""
        living = self._living()
        member = self.members[living[0]] if len(living) == 1 else None
        record = member.machine.commit.record if member is not None else None
        is_alone = record is not None and len(self.view.ids) == 1 and record.generation == self.view.generation
        if member is None or self.finished or not is_alone:
            self._again("lone")
        else:
            shard = self.rng.choice(sorted(member.states))
            self.struck += 1
            self._say(f"FAULT lone {member.me}, shard {shard}")
            self.flipped.add(member.me)
            member.states[shard].cell.flip()

    def _again(self, kind: str) -> None:
        if not self.finished:
            self.faults.append((self.ticks + 5, kind))

    def _die(self, victim: str) -> None:
        self._say(f"    {victim} dies")
        self.dead.add(victim)
        self.doomed.pop(victim, None)
        for to in self.members:  # what was under way may or may not arrive
            keep = self.rng.randint(0, len(self.links[victim, to]))
            self.links[victim, to] = deque(list(self.links[victim, to])[:keep])
        self.agent_todo.append(self._consider)

    def _come_back(self, name: str) -> None:
        self._say(f"{name} comes back")
        self.asleep.pop(name, None)
        self.stalled.pop(name, None)
        if self.cut_off.pop(name, None) is not None:
            self.views[name].append(self.view)

    def _is_redundant(self) -> bool:
        """Every member sees as many backups of every shard as there can be."""
        wanted = min(self.scenario.backups, len(self.view.members) - 1)
        for name in self.view.ids:
            member = self.members[name]
            if (
                not self._acts(name)
                or member.view != self.view
                or member.machine.views.is_recovering
                or member.roles.committed is None
            ):
                return False
            if any(len(h.backups) < wanted or not set(h.all) <= set(self.view.ids) for h in member.roles.committed):
                return False
        return self.committed > self.shape.initial.step

    def _wish(self) -> None:
        """A script calls `job.checkpoint()`."""
        living = self._living()
        if living and not self.finished:
            self._feed(self.rng.choice(living), p.CheckpointWanted(last=False))

    def _hunt(self) -> None:
        """All but one holder of one shard die at once."""
        if self.finished or len(self.view.members) < 2 or not self.scenario.backups:
            return
        holders = self.rng.choice(self._newest_base()).all
        spared = self.rng.choice(holders)
        self.struck += 1
        for victim in holders:
            if victim != spared:
                self._say(f"FAULT hunt {victim}")
                self._die(victim)

    def _doom_two(self) -> None:
        victims = self._living()
        if len(victims) < 3 or self.finished:
            return
        self.struck += 1
        for victim in self.rng.sample(victims, 2):
            self._say(f"FAULT doom {victim}")
            self.doomed[victim] = Partial

    def _join(self) -> None:
        if not self.finished:
            self.struck += 1
            self.joining.append(self._start())
            self._say(f"FAULT join {self.joining[-1].id}")
            self.agent_todo.append(self._consider)

    # ----------------------------------------------------------------------------------------------------------- agent

    def _newest_base(self) -> Placement:
        """As the living know it; where none of them has been told yet, as anybody knew it."""
        for names in (self.view.ids, tuple(self.members)):
            members = [self.members[m] for m in names]
            base = max(members, key=_newest).roles.committed
            if base is not None:
                return base
        return ()

    def _holders(self) -> HoldersByShard:
        return {str(shard): holders.all for shard, holders in enumerate(self._newest_base())}

    def _consider(self) -> None:
        """What an agent does when it hears of a loss or of a joiner: propose, and write the view."""
        if self.finished & set(self.view.ids):
            return
        silent = {*self.asleep, *self.cut_off}
        proposal = propose(
            self.view,
            holders=self._holders(),
            dead=self.dead,
            suspected=silent,
            joining=tuple(self.joining),
            begun=self._has_begun(),
        )
        view = proposal.view
        if proposal.outcome is Outcome.LOST:
            rest = tuple(m for m in self.view.members if m.id not in self.dead)
            if not self._has_begun():  # nothing is lost: somebody is started who begins anew
                self._join()
                return
            if not any(self.members[m.id].roles.committed for m in rest):  # nobody is left who could say it
                self.lost = proposal.reason
            view = View(generation=self.view.generation + 1, members=rest, reason="the dead are gone", begun=True)
        if view is not None and view.members and view.members != self.view.members:
            self._check_view(self.view, view)
            self.removed += [m for m in self.view.ids if m not in view]
            self.joining = [m for m in self.joining if m.id not in view]
            self.view = view
            self._tell_view()
            if self.joining:
                self.agent_todo.append(self._consider)

    def _begin_anew(self, wish: p.BeginAnew) -> None:
        """What an agent does when a member has found something wrong in the open step."""
        if self.view.anew_since <= wish.generation and not self.finished & set(self.view.ids):
            self.view = with_step_anew(self.view, None, wish.reason)
            self._tell_view()

    def _has_begun(self) -> bool:
        return any(member.committed > self.shape.initial.step for member in self.members.values())

    def _check_view(self, old: View, new: View) -> None:
        kept = set(old.ids) & set(new.ids)
        if not set(old.ids) - kept <= self.dead and 2 * len(kept) <= len(old.ids):
            raise Violation(f"a minority went on: {new.ids} of {old.ids}, not all others proven dead")

    # ----------------------------------------------------------------------------------------------------------- ending

    @property
    def outcome(self) -> str:
        return "lost" if self.lost else "diverged" if self.diverged else "ok"

    def _check_end(self) -> None:
        if self.lost or self.diverged:
            return
        # The agents compare what the members end with (`launcher/core/shutdown.py`): so a bit is found that flips
        # behind the last comparison of the members themselves.
        ended = self.finished & set(self.view.ids) - self.dead
        differ = len({self.members[name].digest() for name in ended}) > 1
        for name, wrong in self.wrong.items():
            member = self.members[name]
            assert self.truth is not None
            if name not in self.dead and member.digest() != self.truth.digests[member.committed] and not differ:
                raise Violation(f"{wrong}, and nobody has noticed")
        waiting = [m for m in self.view.ids if m not in self.finished and m not in self.dead]
        if waiting:
            raise Violation(f"stuck after {self.ticks} events: {self._where(waiting)}")

    def _where(self, names: list[str]) -> str:
        parts: list[Any] = []
        for name in names:
            member = self.members[name]
            machine, generation = member.machine, member.view.generation if member.view else None
            parts.append(
                f"{name} gen={generation} committed={member.committed} begun={machine.loop.step} "
                f"recovering={machine.views.is_recovering} pending={machine.step.runs.pending} "
                f"voted={machine.step.ballot.has_voted}"
            )
        return "; ".join(parts)


def _newest(member: SimMember) -> int:
    return member.committed if member.roles.committed else -2


def _has(kinds: tuple[type, ...], wanted: type) -> bool:
    return any(issubclass(kind, wanted) for kind in kinds)


def _short(value: object) -> str:
    """One line of the transcript."""
    if isinstance(value, p.Arrived):
        return f"{value.source} g{value.generation} {_short(value.message)}"
    if isinstance(value, p.Viewed):
        return f"view {value.view.generation}"
    hidden = {"payload", "contribution", "told", "square_norms", "touched", "settings", "state", "base", "record"}
    hidden |= {"checkpoint", "writing"}  # of a vote
    fields = getattr(value, "__dataclass_fields__", {})
    return " ".join(
        [type(value).__name__, *(f"{name}={getattr(value, name)}" for name in fields if name not in hidden)]
    )


def truth_of(scenario: Scenario) -> Truth:
    """The undisturbed job of one."""
    alone = Scenario(
        members=1,
        steps=scenario.steps,
        runs=scenario.runs,
        backups=scenario.backups,
        small=scenario.small,
        run_length=scenario.run_length,
    )
    cluster = Cluster(alone, 0, None)
    cluster.run()
    if set(cluster.seen.digests) != set(range(scenario.steps)):
        raise Violation("the undisturbed job did not end")
    return cluster.seen
