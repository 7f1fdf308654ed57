"""Tries cells one after another in as few jobs as possible; a failure ends its job, and a new one takes the rest."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from elastrain.job.batch import DataOrder
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import visible
from elastrain.snapshot.durable.reading import Checkpoint
from experiments.faults import train
from experiments.faults.cells import START, Aim, Answer, Cell, Ground, next_job, ordered
from experiments.faults.driver import (
    START_S,
    STOPPING,
    STRIKE_S,
    Driver,
    StandstillError,
    StrikeError,
    Struck,
    first_line,
    lasts_s,
)
from experiments.faults.figures import (
    Outcome,
    blamed,
    commits_s,
    detected_after_s,
    ended_after,
    refusal,
    standstill_s,
    struck_s,
    without_flipped,
    without_put_right,
)
from experiments.jobs import Script, alone, elastic, finish
from experiments.recovery.figures import samples_amiss
from experiments.storm.oracle import difference, read_steps, unfinished
from experiments.storm.processes import MARK, Processes, leftovers
from tests.support import warm

STEPS = 240
SIZES: dict[Ground, tuple[int, int | None]] = {
    Ground.HOST: (4, None),
    Ground.NODES: (3, 3),
    Ground.NETNS: (3, 3),
    Ground.HALF: (3, None),
    Ground.DRIVES: (3, None),
    Ground.CHECKPOINTS: (3, None),
}
"""Members, and simulated nodes."""
CHECKPOINTS = "{folder}/checkpoints"
OPTIONS: dict[Ground, tuple[str, ...]] = {
    Ground.HOST: ("--standalone",),
    Ground.NODES: (),
    Ground.NETNS: ("--netns",),
    Ground.HALF: ("--standalone",),
    Ground.DRIVES: ("--standalone", "--memory-limit", "64G", "--offload-dir", "{folder}/disk"),
    Ground.CHECKPOINTS: ("--standalone", "--checkpoint-dir", CHECKPOINTS, "--checkpoint-every", "15", "--keep", "20"),
}
"""`{folder}`: that of the job."""
ORDER = DataOrder(
    dataset_size=train.SAMPLES,
    global_batch_size=train.MICRO_BATCHES * train.MICRO_BATCH_SIZE,
    micro_batch_size=train.MICRO_BATCH_SIZE,
    seed=train.SEED,
)


def script(ground: Ground) -> Script:
    how = {Ground.HALF: ("half",), Ground.DRIVES: ("drives",)}.get(ground, ())
    return Script(path=Path(train.__file__), args=(str(STEPS), *how))


def reference(folder: Path, ground: Ground) -> list[str]:
    """The lines of the undisturbed job of one."""
    with alone(folder, script(ground), start=warm.Popen) as process:
        finish(process, folder, timeout_s=600)
    return read_steps(folder)["alone"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Alike for all jobs of a run."""

    folder: Path
    reference: Callable[[Ground], Sequence[str]]
    patience: float
    tell: Callable[[Outcome], None]


def run_all(cells: Sequence[Cell], ground: Ground, setting: Setting) -> tuple[list[Outcome], list[float]]:
    """What became of the cells of one ground, and the times between two commits of its jobs."""
    left, outcomes, walls_s = ordered(cells), list[Outcome](), list[float]()
    while left and not STOPPING.is_set():
        job = OneJob(ground, setting, setting.folder / f"{ground}-{len(outcomes)}-{len(left)}")
        done = job.run(left[: next_job(left)])
        left = left[len(done) :]
        outcomes += done
        walls_s += job.walls_s
        for outcome in done:
            setting.tell(outcome)
    return outcomes, walls_s


class OneJob:
    """One job, and the cells that are tried in it."""

    def __init__(self, ground: Ground, setting: Setting, folder: Path) -> None:
        self._ground, self._setting, self._folder = ground, setting, folder
        self._outcomes: list[Outcome] = []
        self._known_to_end = self._has_ended = False
        self._steps = STEPS
        self.walls_s: list[float] = []

    def run(self, cells: Sequence[Cell]) -> list[Outcome]:
        """Of the first cells, up to the first failure; at least one."""
        run, temporary = self._folder / "run", self._folder / "tmp"
        run.mkdir(parents=True)
        temporary.mkdir()
        (run / "brake").touch()
        mark = uuid.uuid4().hex
        processes = Processes(mark)
        size, nodes = SIZES[self._ground]
        (self._folder / "disk").mkdir()
        own = [option.format(folder=self._folder) for option in OPTIONS[self._ground]]
        options = [*own, "--max-restarts", "1000", *self._armed(cells[0])]
        with elastic(
            run,
            script(self._ground),
            members=size,
            nodes=nodes,
            options=options,
            temporary=temporary,
            environment={MARK: mark},
            start=warm.Popen,
        ) as process:
            driver = Driver(folder=run, process=process, size=size, steps=STEPS, patience=self._setting.patience)
            try:
                self._try_all(driver, cells)
                self._let_end(driver)
            finally:
                self._has_ended = not driver.alive
                if driver.alive:
                    processes.end()
        driver.follower.look()
        self._judge(driver, processes, temporary)
        processes.end()
        return self._outcomes

    def _armed(self, first: Cell) -> list[str]:
        if first.phase != START:
            return ["--inject"]
        faults = self._folder / "faults.txt"
        faults.write_text(first_line(first.way))
        return ["--faults", str(faults)]

    # -------------------------------------------------------------------------------------------------------- one cell

    def _try_all(self, driver: Driver, cells: Sequence[Cell]) -> None:
        for rank, cell in enumerate(cells):
            outcome = Outcome(cell=cell)
            self._outcomes.append(outcome)
            try:
                self._try(driver, outcome, rank)
            except StrikeError as error:
                outcome.reason = f"not struck: {error}"
            except StandstillError as error:
                outcome.reason, outcome.hang = str(error), not driver.still_commits
            outcome.cut_short = STOPPING.is_set()
            if outcome.reason or not driver.alive:
                return

    def _try(self, driver: Driver, outcome: Outcome, rank: int) -> None:
        cell, way = outcome.cell, outcome.cell.way
        if cell.phase != START:
            driver.wait_until_whole(train.BACKUPS)
            if not driver.alive:
                raise StrikeError(
                    f"the job had ended with code {driver.process.returncode}: {driver.last_words()[-500:]}"
                )
        if way.answer is Answer.GOES_BACK:
            self._wait_for_checkpoints(driver)
        struck = driver.strike(cell, rank)
        outcome.struck_s, outcome.victim = struck.at_s, struck.victims[0]
        if cell.phase == "shutdown":
            driver.wait_for_the_end()
        elif way.answer is Answer.ENDS:
            driver.wait("the job ends", lambda: False, way.within_s)
        elif way.answer is Answer.GOES_BACK:
            self._lose_everything(driver, cell, struck)
        else:
            self._wait_until_well(driver, cell, struck)
        outcome.ended_s = time.monotonic()
        outcome.standstill_s = standstill_s(commits_s(driver.run), struck.at_s, outcome.ended_s)
        outcome.detect_s = _detected_after_s(driver, struck)
        # Of a node that stands still its own agent says nothing either: the others find it silent.
        if way.kind == "partition" or (way.kind == "stop" and way.aim is Aim.NODE):
            outcome.detect_s = _silence_after_s(driver, struck)
        outcome.nothing_struck = refusal(driver.run, struck.victims, struck.at_s)
        outcome.reason = self._broken_promise(driver, outcome, struck)

    def _wait_until_well(self, driver: Driver, cell: Cell, struck: Struck) -> None:
        way, over_s = cell.way, struck.at_s + lasts_s(cell.way)
        lost = [*struck.others, *(struck.victims if way.loses else ())]
        driver.wait(f"{', '.join(lost)} is gone", lambda: all(map(driver.gone, lost)), way.within_s)
        if way.answer is Answer.SHRINKS:
            driver.wait(f"somebody says {way.says!r}", lambda: driver.has_said(way.says), way.within_s)
            driver.size -= 1
            over_s = time.monotonic()
        driver.wait(
            "all members train again",
            lambda: time.monotonic() > over_s and driver.all_train(over_s),
            way.within_s + lasts_s(way),
        )

    def _wait_for_checkpoints(self, driver: Driver) -> None:
        """Until one is complete that has an older one, and the next one is a while away."""
        place = place_at(CHECKPOINTS.format(folder=self._folder))
        known = len(visible(place))
        driver.wait("a second checkpoint is complete", lambda: len(visible(place)) > max(known, 1), START_S)

    def _lose_everything(self, driver: Driver, cell: Cell, struck: Struck) -> None:
        """Kill all members, and wait until others go on: from an older checkpoint, where a newer one was struck."""
        place = place_at(CHECKPOINTS.format(folder=self._folder))

        def refused() -> bool:
            return bool(refusal(driver.run, struck.victims, struck.at_s))

        def is_damaged() -> bool:
            return bool(Checkpoint.open([place], visible(place)[-1]).verify())

        driver.wait("the newest checkpoint is damaged", lambda: refused() or is_damaged(), STRIKE_S)
        gone = driver.kill_all()
        if not refused():
            driver.wait(f"somebody says {cell.way.says!r}", lambda: driver.has_said(cell.way.says), cell.way.within_s)
        lost_s = time.monotonic()
        driver.wait(f"others than {', '.join(gone)} train", lambda: driver.all_train(lost_s), cell.way.within_s)

    def _broken_promise(self, driver: Driver, outcome: Outcome, struck: Struck) -> str:
        """Empty if the job has answered as it should, as far as can be seen by now."""
        way, code = outcome.cell.way, driver.process.poll()
        if outcome.cell.phase == "shutdown":
            return "" if code == 0 else f"ended with code {code}: {driver.last_words()[-500:]}"
        if code is None:
            if way.answer is Answer.ENDS:
                return "the job went on"
            evicted = [victim for victim in struck.victims if driver.gone(victim)]
            return f"{evicted[0]} was lost although it was well again" if evicted and way.loses is False else ""
        self._known_to_end = True
        if way.answer is Answer.GOES_ON:
            return f"ended with code {code}: {driver.last_words()[-500:]}"
        if code == 0:
            return "ended with code 0 before the last step"
        said = re.search(way.says, driver.last_words(), re.IGNORECASE)
        return "" if said else f"ended with code {code} and no sentence like {way.says!r}: {driver.last_words()[-300:]}"

    # -------------------------------------------------------------------------------------------------- the whole job

    def _let_end(self, driver: Driver) -> None:
        """Where nothing failed: some more steps, in which what is wrong would show, and to the end."""
        last = self._outcomes[-1]
        if last.reason or not driver.alive:
            return
        self._steps = driver.end_soon()
        try:
            driver.wait_for_the_end()
        except StrikeError:  # the experiment was ended
            last.cut_short = True
        except StandstillError as error:
            last.reason, last.hang = str(error), True

    def _judge(self, driver: Driver, processes: Processes, temporary: Path) -> None:
        """Every committed step of every member against the undisturbed job, and what is left of the job."""
        members, alone_lines = (
            read_steps(driver.folder),
            ended_after(self._steps, self._setting.reference(self._ground)),
        )
        flipped = {each.victim: each.struck_s for each in self._outcomes if each.cell.way.kind == "flip"}
        members = without_put_right(without_flipped(members, driver.run, flipped), driver.run)
        commits = commits_s(driver.run)
        self.walls_s = [later - earlier for earlier, later in pairwise(commits)]
        wrong = difference(members, alone_lines)
        if wrong:
            self._blame(driver, wrong)
            return
        last = self._outcomes[-1]
        ended_well = driver.process.returncode == 0
        if not last.reason and not self._known_to_end and not ended_well:
            last.reason = f"ended with code {driver.process.returncode}: {driver.last_words()[-500:]}"
        if not last.reason and ended_well:
            last.reason = unfinished(members, alone_lines)
        last.lost_samples = self._lost_samples(driver, whole=ended_well)
        last.reason = last.reason or (f"{last.lost_samples} samples amiss" if last.lost_samples else "")
        if self._has_ended:  # else the experiment has killed it, and all that would have cleared up after it
            last.leftovers = leftovers(processes, driver.folder, temporary, "")
            last.reason = last.reason or "; ".join(last.leftovers)

    def _lost_samples(self, driver: Driver, *, whole: bool) -> int:
        members = list(driver.run.members.values())
        steps = self._steps if whole else 1 + max((p.step for m in members for p in m.passed), default=-1)
        lost, repeated = samples_amiss(members, ORDER, steps)
        return lost + repeated

    def _blame(self, driver: Driver, wrong: str) -> None:
        """The cell before the first wrong step; what came after it is tried again."""
        found = re.match(r"step (\d+):", wrong)
        step = int(found[1]) if found else 0
        at_s = min((p.at_s for m in driver.run.members.values() for p in m.passed if p.step == step), default=None)
        index = blamed(self._outcomes, at_s) or 0
        self._outcomes[index].reason, self._outcomes[index].mismatch = wrong, True
        del self._outcomes[index + 1 :]


def _detected_after_s(driver: Driver, struck: Struck) -> float | None:
    """Until the victims were known to be lost, each from its own last word; of several the one that took longest."""
    found = [detected_after_s(driver.run, each, struck_s(driver.run, each, struck.at_s)) for each in struck.victims]
    return max((each for each in found if each is not None), default=None)


def _silence_after_s(driver: Driver, struck: Struck) -> float | None:
    """Until an agent no longer reached the node that was cut off."""
    node = driver.run.nodes[struck.victims[0]]
    found = [at_s for name, at_s in driver.run.silences if name == node and at_s >= struck.at_s]
    return min(found) - struck.at_s if found else None
