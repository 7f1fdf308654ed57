"""Every phase of a step, struck in every member: is the result the same? With the small script, one job per phase.

The driver asks the job's agent for faults as `elastrain inject` does; each victim kills itself when it is there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastrain.job.batch import DataOrder
from elastrain.job.world import PHASES
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.operator_messages import AskFault
from elastrain.launcher.shared.rundir import RunDir
from experiments.jobs import Script, alone, elastic, finish
from experiments.journals import Follower, Member, Run, read_member
from experiments.recovery import small
from experiments.recovery.figures import steps_lost, uncommitted, wrong_samples

MEMBERS = 4
BACKUPS = 2
"""Two, because some cells lose two members at nearly the same time; one loss at a time needs one."""
STEPS = 300
AHEAD = 2
"""How many steps after the present one a fault is aimed at."""
LOOK_EVERY_S = 0.02
STRIKE_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 600.0
ORDER = DataOrder(
    dataset_size=small.SAMPLES, global_batch_size=small.GLOBAL_BATCH_SIZE, micro_batch_size=small.MICRO_BATCH_SIZE
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One phase, struck in the member at one rank."""

    phase: str
    rank: int
    struck: bool
    """Whether the victim's journal says that it died there."""
    reason: str
    """Why the job's result is not the undisturbed one's; empty if it is."""

    @property
    def held(self) -> bool:
        return self.struck and not self.reason


class StrikeError(Exception):
    """A fault did not strike in time, or the job ended before it could."""


@dataclass(kw_only=True)
class Driver:
    """Follows one job and strikes in it."""

    folder: Path
    alive: Callable[[], bool]
    whole_nodes: bool = False
    """Strike the victim's node: its workers and its agent."""
    follower: Follower = field(init=False)

    def __post_init__(self) -> None:
        self.follower = Follower(self.folder)

    @property
    def run(self) -> Run:
        return self.follower.run

    def wait(self, what: str, until: Callable[[Run], bool]) -> None:
        """Look until it is so. Raises StrikeError when it takes too long or the job has ended."""
        deadline_s = time.monotonic() + STRIKE_TIMEOUT_S
        while not until(self.follower.look()):
            if time.monotonic() > deadline_s or not self.alive():
                raise StrikeError(f"waited in vain until {what}")
            time.sleep(LOOK_EVERY_S)

    def all_there(self) -> None:
        """All members in the view, none of them dead since, and a step passed by all of them."""
        self.wait("all members train", lambda run: bool(run.views) and self._trains(run))

    def _trains(self, run: Run) -> bool:
        view = run.views[-1]
        inside = [run.members[name] for name in view.members if name not in run.deaths_s]
        return len(inside) == MEMBERS and all(any(p.at_s > view.at_s for p in member.passed[-3:]) for member in inside)

    def step(self) -> int:
        return max(passed.step for member in self.run.members.values() for passed in member.passed)

    def inject(self, member: str, at: str) -> None:
        """As `elastrain inject kill`. Raises StrikeError if the agent refuses."""
        target = f"node:{self.run.nodes[member]}" if self.whole_nodes else f"member:{member}"
        request = AskFault(line=f"kill --target {target} --at {at}")
        answer = operator_messages.ask(RunDir(path=self.folder), request)
        if not answer.ok:
            raise StrikeError(answer.sentence)

    def kill(self, member: str) -> None:
        if self.whole_nodes:
            os.kill(self.run.agents[self.run.nodes[member]], signal.SIGKILL)
        os.killpg(self.run.pids[member], signal.SIGKILL)

    def gone(self, member: str) -> None:
        """Known to have died, or left out of a view."""
        self.wait(f"{member} has died", lambda run: member in run.deaths_s or run.view_without(member) is not None)

    def newcomer(self, of: str) -> str:
        self.wait(f"{of} is started again", lambda run: of in run.replaces.values())
        return next(new for new, old in self.run.replaces.items() if old == of)


def in_a_step(driver: Driver, phase: str, rank: int) -> str:
    """The phases that every member goes through in every step."""
    victim = driver.run.views[-1].members[rank]
    driver.inject(victim, f"step={driver.step() + AHEAD},phase={phase}")
    return victim


def after_a_loss(driver: Driver, phase: str, rank: int) -> str:
    """Phases that only the loss of somebody else brings about: another member is killed first."""
    members = driver.run.views[-1].members
    driver.inject(members[rank], f"phase={phase}")
    driver.kill(members[(rank + 1) % len(members)])
    return members[rank]


def in_a_newcomer(driver: Driver, phase: str, rank: int) -> str:
    """A member is killed, and then the one that comes in its place."""
    first = driver.run.views[-1].members[rank]
    driver.kill(first)
    newcomer = driver.newcomer(first)
    driver.inject(newcomer, f"phase={phase}")
    return newcomer


def at_the_end(driver: Driver, phase: str, rank: int) -> str:
    victim = driver.run.views[-1].members[rank]
    driver.inject(victim, f"step={STEPS},phase={phase}")
    (driver.folder / "slow").unlink(missing_ok=True)
    return victim


def both_at_once(driver: Driver, phase: str, rank: int) -> str:
    """A worker, and the node of another one, at the same moment."""
    members = driver.run.views[-1].members
    os.killpg(driver.run.pids[members[(rank + 1) % len(members)]], signal.SIGKILL)
    driver.kill(members[rank])
    return members[rank]


BOTH = "both at once"
STRIKES: dict[str, Callable[[Driver, str, int], str]] = {
    "join": in_a_newcomer,
    **dict.fromkeys(("quiesce", "report", "decide", "complete", "copy"), after_a_loss),
    "shutdown": at_the_end,
    BOTH: both_at_once,
}


def full(folder: Path) -> list[Cell]:
    """All phases × all ranks."""
    reference = reference_of(folder)
    jobs = [(phase, tuple(range(MEMBERS))) for phase in PHASES if phase != "shutdown"]
    jobs += [("shutdown", (rank,)) for rank in range(MEMBERS)]
    cells = []
    for phase, ranks in jobs:
        cells += shown(strike(folder, [(phase, rank) for rank in ranks], reference))
    return cells


def quick(folder: Path) -> list[Cell]:
    """Two phases, each in another member."""
    return shown(strike(folder, [("backward", 1), ("commit", 2)], reference_of(folder)))


def of_nodes(folder: Path, *, quick: bool) -> list[Cell]:
    """Whole nodes instead of workers: each phase in one of them; and a worker together with a node."""
    reference = reference_of(folder)
    phases = ["commit"] if quick else [phase for phase in PHASES if phase != "shutdown"]
    cells = [(phase, 1 + index % (MEMBERS - 1)) for index, phase in enumerate((*phases, BOTH))]
    # Four to a job: each waits until the node before has come back.
    jobs = [cells[index : index + 4] for index in range(0, len(cells), 4)] + ([] if quick else [[("shutdown", 1)]])
    return shown([cell for job in jobs for cell in strike(folder, job, reference, nodes=MEMBERS)])


def reference_of(folder: Path) -> Member:
    """The undisturbed job of one."""
    place = folder / "small-alone"
    with alone(place, script()) as process:
        finish(process, place, timeout_s=JOB_TIMEOUT_S)
    return read_member(place)


def script(slow: Path | None = None) -> Script:
    waiting = () if slow is None else ("--slow-while", str(slow))
    return Script(path=Path(small.__file__), args=("--steps", str(STEPS), "--backups", str(BACKUPS), *waiting))


def strike(
    folder: Path, cells: Sequence[tuple[str, int]], reference: Member, *, nodes: int | None = None
) -> list[Cell]:
    """One job with a fault for each cell, one after the other; the next one when all members are there again."""
    name = "-".join(["small", *(f"{phase}{rank}" for phase, rank in cells), *(["nodes"] if nodes else [])])
    place = folder / name.replace(" ", "-")
    place.mkdir(parents=True)
    (place / "slow").touch()
    victims: list[str] = []
    reason = ""
    options = ("--inject", "--max-restarts", str(3 * len(cells)))
    with elastic(place, script(place / "slow"), members=MEMBERS, nodes=nodes, options=options) as process:
        driver = Driver(folder=place, alive=lambda: process.poll() is None, whole_nodes=nodes is not None)
        try:
            for phase, rank in cells:
                driver.all_there()
                victims.append(STRIKES.get(phase, in_a_step)(driver, phase, rank))
                driver.gone(victims[-1])
            (place / "slow").unlink(missing_ok=True)
            finish(process, place, timeout_s=JOB_TIMEOUT_S)
        except (StrikeError, RuntimeError) as error:
            reason = str(error)
    run = driver.follower.look()
    reason = reason or "; ".join(differences(run, reference))
    return [
        Cell(
            phase=phase,
            rank=rank,
            struck=index < len(victims) and phase in (BOTH, *_died_in(run, victims[index])),
            reason=reason,
        )
        for index, (phase, rank) in enumerate(cells)
    ]


def differences(run: Run, reference: Member) -> Iterator[str]:
    """Everything in which the run's result is not that of the undisturbed job."""
    members = list(run.members.values())
    ends = {member.digest for member in members if member.digest is not None}
    if ends != {reference.digest}:
        yield f"digests {ends or 'none'}, undisturbed {reference.digest}"
    if lost := steps_lost(members) + len(uncommitted(members, STEPS)):
        yield f"{lost} steps lost"
    if wrong := wrong_samples(members, ORDER):
        yield f"steps {wrong} have other samples"


def _died_in(run: Run, member: str) -> set[str]:
    return {fault.phase for fault in run.members[member].faults}


def shown(cells: list[Cell]) -> list[Cell]:
    """The same cells, after a line per phase: what became of each rank, and what went wrong."""
    for phase in dict.fromkeys(cell.phase for cell in cells):
        row = [cell for cell in cells if cell.phase == phase]
        marks = " ".join(f"{cell.rank}:{'equal' if cell.held else 'FAILED'}" for cell in row)
        print(f"{phase:<12}{marks}", flush=True)
        for reason in dict.fromkeys(cell.reason or "not struck" for cell in row if not cell.held):
            print(f"{'':<12}{reason}")
    return cells
