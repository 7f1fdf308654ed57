"""One worker process: the production engine, protocol core and ledger, over symbols; and a modelled training loop.

The engine's thread and the main thread are one process here: `turn` is one turn of the engine, and the parts of the
training loop (forwards, backwards block by block) take their time one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elastrain import protocol as p
from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.comm.errors import MemberLost
from elastrain.comm.wire.addresses import Frame, LossCause, Peer, PeerLost
from elastrain.errors import ElastrainError, StoppedError
from elastrain.job.checkpoint_plan import CheckpointPlan
from elastrain.launcher.core import agent_events as ev
from elastrain.protocol import agent_messages as am
from elastrain.protocol.messages import Message, decode
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.engine.engine import Engine, EngineParts
from elastrain.runtime.engine.pacing import LOOK_EVERY_S
from elastrain.runtime.faults.armed import ArmedFaults
from elastrain.runtime.io.agent_link import AgentLink
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.journal import Journal
from elastrain.runtime.io.loop_channel import Assignment, LoopFailed, LoopOver, StepBegun
from elastrain.runtime.loop.exit_report import ExitReport
from elastrain.runtime.model.flats import in_private_memory
from tests.sim.job.clock import Process
from tests.sim.job.local_writer import LocalWriter
from tests.sim.job.network import Stream
from tests.sim.job.node_disks import NodeDisks
from tests.sim.job.schedule import FROZEN, Straggle
from tests.sim.job.writer import SimWriter
from tests.sim.member import Run, SimMember, Violation
from tests.sim.symbols import Ref, Slot

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess, SimWorkers
    from tests.sim.job.world import World

_PART_S = (0.04, 0.05, 0.08)
"""How long a forward, or a block's backward, takes."""


class Died(Exception):  # noqa: N818  no error: a fault has struck in the middle of an event
    """The process is killed here."""


class NoTools:
    """What other faults are done with: whatever is asked of it, nothing happens."""

    def __getattr__(self, name: str) -> NoTools:
        return self

    def __call__(self, *_: Any, **__: Any) -> None: ...


class SimMesh:
    """`Mesh`: frames to the other members of the view, and what becomes of its links."""

    def __init__(self, process: MemberProcess) -> None:
        self.address, self.generation = process.id, 0
        self._process, self._world = process, process.world
        self._peers: set[str] = set()
        self.links = self
        self._lost: set[str] = set()
        self._arrived: deque[Frame | PeerLost] = deque()
        self._streams: dict[str, Stream] = {}
        self._is_to_wake = False
        self.sends_left: int | None = None
        """It dies when it has sent so many more frames."""

    # ---- the port

    def poll(self, wait_s: float) -> Iterable[Frame | PeerLost]:
        arrived, self._arrived = self._arrived, deque()
        # A copy is to go without news; one wake-up at a time, and none where work behind brings turns anyway.
        if wait_s < LOOK_EVERY_S and not self._is_to_wake and not self._process.sim.has_work_behind:
            self._is_to_wake = True
            self._process.later(max(wait_s, 0.001), self._wake_up)
        # Those of older generations are thrown away before anybody sees them.
        return [a for a in arrived if isinstance(a, PeerLost) or a.generation >= self.generation]

    def _wake_up(self) -> None:
        self._is_to_wake = False
        self._process.turn()

    def send(self, member: str, kind: int, body: bytes, tensors: Sequence[Any]) -> None:
        if self.sends_left is not None:
            self.sends_left -= 1
            if self.sends_left < 0:
                raise Died
        if member not in self._peers or member in self._lost:
            raise MemberLost(member, "no link")
        what = f"what {self._process.id} sent"
        payload = [Ref(place, what, place.value) for place in tensors]
        frame = Frame(source=self._process.id, generation=self.generation, kind=kind, body=body, tensors=tuple(payload))  # type: ignore[arg-type]
        if self._world.tell is not None:
            self._world.tell_send(self._process.id, member, decode(kind, body))
        self.stream(member).send(frame)

    def may_be_torn(self) -> bool:
        processes = self._process.world.processes
        return any(m in processes and processes[m].mesh.generation > self.generation for m in self._peers)

    def take_rates(self) -> dict[str, float]:
        """Simulated frames come whole."""
        return {}

    def busy(self) -> frozenset[str]:
        """A simulated link takes everything at once."""
        return frozenset()

    def edit(self, generation: int, peers: Sequence[Peer], links: str, renew: bool = False) -> None:
        """Links that both views have stay as they are, the lost ones too, which are told again; or all are renewed."""
        ids = {peer.id for peer in peers}
        left_out, self._peers = self._peers - ids, ids - {self._process.id}
        lost, self._lost = set[str]() if renew else self._lost & self._peers, set()
        self.generation = generation
        for member in left_out:
            self._world.mesh.leave_out(self._process, member)
        for member in sorted(lost):
            again = lambda member=member: self.lose(member, "it was lost before", LossCause.BROKEN)  # noqa: E731
            self._process.later(0.0, again)
        self._world.mesh.opened(self._process)

    def watch(self, fd: int, callback: Callable[[], None]) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...

    # ---- links

    def stream(self, member: str) -> Stream:
        if member not in self._streams:
            to = self._world.processes[member]
            can_be_cut = not self._world.schedule.one_host
            self._streams[member] = Stream(
                self._world.network, self._process.node, to, to.mesh.take, can_be_cut=can_be_cut
            )
        return self._streams[member]

    def knows(self, member: str) -> bool:
        return member in self._peers and member not in self._lost

    def take(self, arrival: Frame | PeerLost) -> None:
        if isinstance(arrival, PeerLost):
            if not self.knows(arrival.member):
                return
            self._lost.add(arrival.member)
        elif arrival.source in self._lost and arrival.generation == self.generation:
            self._world.mesh.turned_away(self._world.processes[arrival.source], self._process)
            return
        self._arrived.append(arrival)
        self._process.turn()

    def lose(self, member: str, reason: str, cause: LossCause) -> None:
        """The link to that member is gone."""
        self.take(PeerLost(member=member, reason=reason, at_s=0.0, cause=cause))

    def drop(self, member: str) -> None:
        """What is on its way there is lost."""
        if member in self._streams:
            self._streams[member].drop()

    def die(self, reason: str, cause: LossCause) -> None:
        """A first part of what is under way still arrives; then the others see the end of the link."""
        for member in sorted(self._peers):
            lost = PeerLost(member=self._process.id, reason=reason, at_s=0.0, cause=cause)
            self.stream(member).break_off(last=lost)

    def vanish(self) -> None:
        """Its machine is gone without a word."""
        for stream in self._streams.values():
            stream.break_off()


class SimChannel:
    """`Channel`: to its agent and from it."""

    def __init__(self, process: MemberProcess, workers: SimWorkers) -> None:
        self._process, self._workers = process, workers
        self.heard: list[am.ToWorker] = []

    def fileno(self) -> int:
        return -1

    def send(self, message: am.FromWorker, *, fd: int | None = None) -> None:
        self._workers.say(self._process.id, message)

    def receive(self) -> list[am.ToWorker]:
        heard, self.heard = self.heard, []
        return heard


class ComputeTimes(NoTools):
    """`LoopHeartbeat`, as far as it keeps how long micro-batches took."""

    def __init__(self) -> None:
        self._computed_s: deque[float] = deque()
        self.micro_batches = 0

    computed, take_computed_s = LoopHeartbeat.computed, LoopHeartbeat.take_computed_s


class SimHandover:
    """`LoopChannel`, without waiting: what the engine gives goes to the training loop."""

    landing = Landing()

    def __init__(self, process: MemberProcess) -> None:
        self._process = process
        self._told: deque[Any] = deque()
        times_count = any(isinstance(fault, Straggle) for fault in process.world.schedule.faults)
        self.whereabouts = ComputeTimes() if times_count else NoTools()

    def tell(self, told: Any) -> None:
        self._told.append(told)
        self._process.turn()

    @property
    def has_news(self) -> bool:
        return bool(self._told)

    def take(self) -> Iterable[Any]:
        while self._told:
            yield self._told.popleft()

    def give(self, outcome: Any) -> None:
        self._process.loop.take(outcome)

    def end(self, failure: Exception | None = None) -> None:
        if isinstance(failure, StoppedError) and "handed over" in str(failure):
            self._process.life.checks.handed_over(self._process)
        self._process.loop.end()


class SimExecutor:
    """`Executor`: the member's books over symbols."""

    def __init__(self, process: MemberProcess, member: SimMember) -> None:
        self._process, self._member = process, member
        self.books = member.ledger
        self.memory = TensorMemory(in_private_memory)  # the host's: symbols are not copied
        self.hyper: dict[int, Any] = {}
        disk = process.world.disk
        self._writer = LocalWriter(process, disk) if isinstance(disk, NodeDisks) else SimWriter(process, disk)

    def look(self) -> None:
        """After each turn: work behind takes states, too."""
        self._writer.look()

    def checkpoint_settled(self, message: am.CheckpointSettled) -> None:
        self._writer.settled(message)

    def begin_step(self, step: int, hyper: Any, loop_payload: Any) -> None:
        self.hyper[step] = hyper

    def resumed(self) -> None:
        """Whose the disk is, nobody asks here."""

    def is_checkpoint_due(self, view: Any, now_s: float) -> bool:
        return False

    def check_slot(self) -> Slot:
        return self._member.symbols.new_slot()

    def check_is_over(self) -> None: ...

    def _read(self, command: p.ReadInitial) -> None:
        """As `StoredInitial` does: it takes its time."""

        disk, resume = self._process.world.disk, self._process.life.resume

        def end() -> None:
            if resume is not None and disk.is_waited_for(resume):
                self._process.later(0.5, end)
                return
            lost = disk.trouble(self._process, resume) if resume is not None else None
            if lost is not None:
                self._process.handover.tell(LoopFailed(lost))
                return
            self._member.symbols.read(command.shards, left_alone=self._member.elsewhere)
            self._process.handover.tell(p.InitialRead(shards=command.shards))

        self._process.later(self._process.clock.rng.choice((0.01, 0.1, 1.5)), end)

    def carry_out(self, command: p.Command) -> p.Event | None:
        if isinstance(command, p.ReadInitial):
            self._read(command)
        if self._writer.carry_out(command):
            return None
        result = self._member.work(command)
        self._process.life.checks.members.command(self._member, command)
        return result


class SimPoints(ArmedFaults):
    """The places of a step at which a schedule may kill."""

    def __init__(self) -> None:
        super().__init__(Journal(None, ""), lambda number: None, NoTools())  # type: ignore[arg-type]
        self.phase = ""

    def arm(self, fault: am.ArmFault) -> None: ...

    def reach(self, step: int, phase: str) -> None:
        if phase == self.phase:
            raise Died


class MemberProcess(Process):
    """From its start to its exit. `sim` is its core with its symbols, for whoever checks them."""

    def __init__(self, world: World, agent: AgentProcess, member: str) -> None:
        super().__init__(world.clock, agent.node)
        self.world, self.id, self.life = world, member, agent.life
        workers = agent.workers
        self.has_said_hello = False
        self._workers = workers
        sizes = world.schedule
        plan = CheckpointPlan(every_steps=sizes.checkpoint_every, all_holders=sizes.local_disks)
        budget_bytes = world.clock.rng.choice((1, 20, 1 << 20))
        self.sim = SimMember(member, self.life.shape, budget_bytes, frozen=FROZEN, checkpoints=plan)
        self.sim.symbols.stored = self.life.stored
        self.sim.disk.has_room = not world.schedule.no_room
        self.mesh, self.points = SimMesh(self), SimPoints()
        self.loop = TrainingLoop(self)
        self._channel = SimChannel(self, workers)
        self.link = AgentLink(member, self._channel)  # type: ignore[arg-type]
        self._engine = self._make_engine()
        self._is_turning = self._has_more = False
        self._works_behind = False
        self._paused_since_s = 0.0
        self.vanished = False
        """With its machine: nobody says that it is gone."""
        self.life.checks.enter(self)
        world.processes[member] = self

    def _make_engine(self) -> Engine:
        handle = self.sim.core.handle

        def watched(event: p.Event) -> list[p.Command]:
            self.world.tell_event(self.id, event)
            commands = handle(event)
            for command in commands:
                self.world.tell_command(command)
                if isinstance(command, p.Passed | p.Resumed | p.SendMessage):
                    self.life.checks.members.command(self.sim, command)
            return commands

        self.sim.core.handle = watched  # type: ignore[method-assign]
        journal: Any = SimpleNamespace(write=lambda *_, **__: None)
        handover = self.handover = SimHandover(self)
        mesh, executor, faults = self.mesh, SimExecutor(self, self.sim), self.points
        beacon = SimpleNamespace(fd=None)
        self.executor = executor
        parts: Any = SimpleNamespace(
            **dict.fromkeys(EngineParts.__dataclass_fields__),
        )
        parts.mesh, parts.beacon, parts.agent, parts.executor = mesh, beacon, self.link, executor
        parts.handover, parts.faults, parts.journal = handover, faults, journal
        parts.report = ExitReport(self.link, lambda: None).report
        parts.clock = self.clock.monotonic
        parts.idle_cores = lambda: self.clock.rng.choice((0.0, 0.3, 2.0))
        parts.trail = SimpleNamespace(move=lambda *_, **__: None, beat=lambda: None)
        return Engine(self.sim.core, parts)

    # ---- its life

    def seen(self) -> ev.Seen:
        """What its page says, and the kernel: its engine comes round twice a second as long as the process runs."""
        turns = int(2 * (self.clock.now if self.runs else self._paused_since_s))
        engine = ev.SeenThread(spot=ThreadStatus(count=turns, place=Station.TURNING), starved_s=0.0)
        loop = ev.SeenThread(spot=self.loop.spot(), starved_s=0.0)
        return ev.Seen(member=self.id, loop=loop, engine=engine, stopped=not self.runs)

    def pause(self, for_s: float) -> None:
        super().pause(for_s)
        self._paused_since_s = self.clock.now

    def start(self) -> None:
        usual = self.clock.rng.choice((0.2, 0.3, 0.5, 3.0))
        self.later(usual, self._say_hello)

    def _say_hello(self) -> None:
        self.has_said_hello = True
        backups = self.world.schedule.backups
        fits = not self.world.is_misfit_due()
        self._engine.start({"backups": backups if fits else backups + 1})
        self._look_at_recovery()

    def _look_at_recovery(self) -> None:
        """The engine looks every half a second whether a recovery is late."""
        self.turn()
        self.later(2.0, self._look_at_recovery)

    def hear(self, message: am.ToWorker) -> None:
        self._channel.heard.append(message)
        self.link.note_readable()
        if isinstance(message, am.Refused | am.Stop):
            self.exit(1)
            return
        self.turn()

    def turn(self) -> None:
        """One turn of the engine, or several where one brings the next."""
        self._has_more = True
        if self._is_turning or not self.alive:
            return
        self._is_turning = True
        try:
            while self._has_more and self.alive:
                self._has_more = False
                self._turn_once()
        finally:
            self._is_turning = False

    def _turn_once(self) -> None:
        checks = self.life.checks
        try:
            self._engine.turn()
            self.executor.look()
            self.sim._release()
            checks.members.event(self.sim)
        except Died:
            checks.members.fresh = None
            self.world.say(f"FAULT {self.id} dies in the middle of an event")
            self.die(-9)
            return
        except Violation:
            if self.id in self.life.checks.ids:
                raise
            self.exit(1)  # who was removed may read what others have released: nobody listens
            return
        except ElastrainError as failure:
            self.life.checks.failure(self, failure)
            self._engine._give_up(failure)
        self._go_on_behind()

    def _go_on_behind(self) -> None:
        if self.alive and self.sim.has_work_behind and not self._works_behind:
            self._works_behind = True
            slow = 0.4 if self.world.schedule.slow_behind else 0.06
            self.later(self.clock.rng.uniform(0.003, slow), self._behind)

    def _behind(self) -> None:
        self._works_behind = False
        self.turn()
        self._go_on_behind()

    # ---- its end

    def exit(self, code: int) -> None:
        """Its script has come to its end."""
        self.die(code, in_good_order=True)

    def die(self, code: int, *, in_good_order: bool = False, silent: bool = False, told: bool = True) -> None:
        if not self.alive:
            return
        self.alive = False
        self.world.say(f"{self.id} ends with {code}")
        if code:
            self.world.dead.add(self.id)
        self.life.checks.died()
        self.world.mesh.died(self, in_good_order=in_good_order, silent=silent)
        if told:
            self._workers.ended(self, code)


class TrainingLoop:
    """The user's script: it computes what it is given, steps its scheduler, and ends after the last step."""

    def __init__(self, process: MemberProcess) -> None:
        self._process, self._world = process, process.world
        self._parts: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._is_over = False
        self._has_entered = self._has_ended = False
        self.step = 0
        self.stalls_for_s = 0.0
        self._done = 0
        """Parts of its work; counts what it has come further by."""
        self._part_s = self._world.clock.rng.choice(_PART_S)
        self._slowness = 1.0
        self._took_s = 0.0
        """The part that was done last."""
        self._computed_s = 0.0
        """The micro-batch that is being computed, until now."""

    def straggle(self, factor: float, for_s: float) -> None:
        self._slowness = factor

        def end() -> None:
            self._slowness = 1.0

        self._world.clock.at(for_s, end)

    def spot(self) -> ThreadStatus:
        """Where it is, as others care."""
        place = Station.OUTSIDE
        if self._has_entered and not self._is_over:
            place = Station.COMPUTING if self._parts else Station.WAITING
        return ThreadStatus(count=self._done, place=place, step=self.step)

    def take(self, outcome: Any) -> None:
        """An outcome of the hand-over."""
        match outcome:
            case Assignment():
                self._compute(outcome)
            case p.Advance():
                self._advance(outcome)
            case p.Enter():
                self._enter(outcome)
            case LoopOver():
                self._parts.append(lambda: self._leave(outcome))
        self._go_on()

    def end(self) -> None:
        """The engine has given up: the main thread ends with an error when it waits next."""
        self._is_over = True
        self._parts.append(lambda: self._process.exit(1))
        self._go_on()

    def _go_on(self) -> None:
        if self._parts and not self._is_busy:
            self._is_busy = True
            takes_s = self._part_s * self._slowness * self._world.clock.rng.uniform(0.8, 1.2) + self.stalls_for_s
            self.stalls_for_s, self._took_s = 0.0, takes_s
            self._process.later(takes_s, self._do_part)

    def _do_part(self) -> None:
        self._is_busy = False
        self._done += 1
        self._parts.popleft()()
        if self._process.alive:
            self._go_on()

    def _tell(self, told: Any) -> None:
        self._process.handover.tell(told)

    # ---- what is done

    def _enter(self, enter: p.Enter) -> None:
        first = self._process.life.shape.initial.step + 1
        if enter.step > first and enter.state is None:
            raise Violation(f"{self._process.id} enters step {enter.step} without the others' loop state")
        self._has_entered = True
        self._process.sim.enter(enter.state or self._process.life.loop)  # what the checkpoint says of the loop
        self._begin(enter.step)

    def _begin(self, step: int) -> None:
        sim = self._process.sim
        if sim.loop != step:
            raise Violation(f"the loop of {sim.me} enters step {step} with the state of step {sim.loop}")
        self.step = step

        def begin() -> None:
            began = sim.begin(step)
            self._tell(StepBegun(event=began, hyper=None, payload=list))  # type: ignore[arg-type]
            if not self._process.alive:
                return
            if step >= self._world.schedule.steps:
                self._has_ended = True
                self._tell(p.LoopEnded(step=step))
            else:
                self._tell(p.Ready())

        self._parts.append(begin)

    def _compute(self, assignment: Assignment) -> None:
        compute, sim = assignment.compute, self._process.sim
        sim.forwards += 1
        if isinstance(compute, p.Compute):
            run = Run(compute, assignment.slot)  # type: ignore[arg-type]
            self._parts.append(lambda: self._forward(run))
            for block in reversed(range(sim.shape.blocks)):
                self._parts.append(lambda block=block: self._backward(run, block))  # type: ignore[misc]
        if isinstance(compute, p.Recompute) or compute.probed:
            self._check(compute)
        self._parts.append(lambda: self._tell(p.Ready()))

    def _forward(self, run: Run) -> None:
        self._computed_s = self._took_s
        self._process.sim.forward(run)

    def _backward(self, run: Run, block: int) -> None:
        self._computed_s += self._took_s
        if block == 0:
            self._process.handover.whereabouts.computed(self._computed_s)
        done = self._process.sim.backward(run, block)
        if done is not None:
            self._tell(done)

    def _check(self, compute: p.Compute | p.Recompute) -> None:
        sim, step, run = self._process.sim, compute.step, compute.run
        weights, check = sim.digest(), sim.check_of_run(step, run, compute.loss_scale)

        def checked() -> None:
            if sim.digest() != weights and sim.me in self._process.life.checks.ids:
                raise Violation(f"the parameters of {sim.me} changed while it computed run {run} of step {step}")
            self._tell(p.Checked(step=step, run=run, check=check))

        self._parts.append(checked)

    def _advance(self, advance: p.Advance) -> None:
        self._process.life.checks.advanced(self._process, advance.record.step)
        self._process.sim.loop += 1
        self._begin(advance.record.step + 1)

    def _leave(self, over: LoopOver) -> None:
        """The work is done everywhere, says the engine; here it may not be."""
        if not self._has_entered or not (self._has_ended or over.overruled):
            self._process.exit(1)
            return
        process = self._process
        self._process.life.checks.finished(process)
        process.link.say(am.Finished(step=self.step, digest=f"{process.sim.digest():016x}"))
        rest_s = self._world.clock.rng.choice((0.0, 0.1, 1.0))
        process.later(rest_s, lambda: process.exit(0))


def name_of(message: Message) -> str:
    return type(message).__name__
