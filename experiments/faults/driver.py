"""One job on real processes: follows it, strikes in it as `elastrain inject` does, and says what became of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastrain.base.processes import scheduled
from elastrain.errors import ElastrainError
from elastrain.launcher.cli.commands.inject import ask
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.table import CLASSES, Carrier
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.operator_messages import AskState
from elastrain.launcher.shared.rundir import RunDir
from experiments.faults.cells import START, Aim, Cell, Way
from experiments.journals import Follower, Run
from experiments.storm.permission import spare

LEARNED_STEPS = 6
"""So many steps a job must have committed before anything is struck in it: its agents judge hangs by its own pace."""
AHEAD = 2
"""How many steps after the present one a fault is aimed at."""
STEPS_TO_THE_END = 30
"""So many more a job makes when nothing is struck in it any more."""
LOOK_EVERY_S, ASK_EVERY_S = 0.01, 0.2
STRIKE_S, START_S = 20.0, 90.0
"""So long a fault may take to its place, and a job to its first commits."""
END_S = 60.0
"""So long a job that nobody strikes any more may take to its last step; more while it commits."""
COMMITS_S = 5.0
"""A job that has committed nothing for so long stands still."""
IN_A_NEWCOMER = ("join",)
IN_EVERY_STEP = ("forward", "backward", "reduce", "commit", "apply", "publish")
AT_THE_END = ("shutdown",)


STOPPING = threading.Event()
"""Set when somebody ends the experiment: no driver waits for anything any more."""


class StrikeError(Exception):
    """The fault could not be struck: nothing is known of how the job bears it."""


class StandstillError(Exception):
    """The job neither goes on nor ends within the time that it has."""


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A strike that happened."""

    victims: tuple[str, ...]
    """Members that were struck, or whose node was."""
    others: tuple[str, ...] = ()
    """Members that the driver killed to bring the phase about."""
    at_s: float


@dataclass(kw_only=True)
class Driver:
    """`patience` multiplies all times: 1 is a quiet machine."""

    folder: Path
    process: subprocess.Popen[bytes]
    size: int
    steps: int
    patience: float = 1.0
    follower: Follower = field(init=False)

    def __post_init__(self) -> None:
        self.follower = Follower(self.folder)

    @property
    def run(self) -> Run:
        return self.follower.run

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    # ------------------------------------------------------------------------------------------------------- looking

    def wait(self, what: str, until: Callable[[], bool], within_s: float) -> None:
        """Look until it is so, or the job has ended. Raises StandstillError."""
        deadline_s = time.monotonic() + within_s * self.patience
        while self.alive and not self._is(until):
            if STOPPING.is_set():
                raise StrikeError("the experiment was ended")
            if time.monotonic() > deadline_s:
                raise StandstillError(f"waited in vain for {within_s * self.patience:.0f} s until {what}")
            time.sleep(LOOK_EVERY_S)
        self.follower.look()

    def _is(self, until: Callable[[], bool]) -> bool:
        self.follower.look()
        return until()

    def wait_for_the_end(self, until: Callable[[], bool] = lambda: False) -> None:
        """Of the job, or until it is so. Raises StandstillError for one that does not go on to its last step."""
        while self.alive and not self._is(until):
            starved_s = self._starved_s()
            try:
                self.wait("the job ends", until, END_S)
            except StandstillError:
                # Else the machine is busy: steps that are left are counted; a hang is found by what the loop could run.
                if not self.still_commits and self._starved_s() - starved_s < END_S * self.patience / 2:
                    raise

    def _starved_s(self) -> float:
        """For how long the loop of the most starved member has waited for a processor, which no agent counts."""
        return max((scheduled(pid).waited_s for pid in self.run.pids.values()), default=0.0)

    @property
    def still_commits(self) -> bool:
        """Whether it goes on, for example although it should end, or lacks a member."""
        return self.all_train(time.monotonic() - COMMITS_S * self.patience)

    def all_train(self, since_s: float = 0.0) -> bool:
        """As many members as configured are in the newest view, live, and have passed a step in it since then."""
        if not self.run.views:
            return False
        view = self.run.views[-1]
        inside = [self.run.members[name] for name in view.members if name not in self.run.deaths_s]
        after_s = max(view.at_s, since_s)
        return len(inside) == self.size and all(
            any(passed.at_s > after_s for passed in member.passed[-3:]) for member in inside
        )

    def wait_until_whole(self, spare_min: int) -> None:
        """All train, and every shard survives the loss of so many, as the agents tell. Raises StandstillError."""
        self.wait("all members train", self.all_train, START_S)
        self.wait(
            f"every shard survives the loss of {spare_min}",
            lambda: self.step >= LEARNED_STEPS and self._spare() >= spare_min and self.all_train(),
            START_S,
        )

    def survives(self, losses: int) -> bool:
        """All train, and every shard survives so many losses, as the agents tell."""
        return self.all_train() and self._spare() >= losses

    def _spare(self) -> int:
        time.sleep(ASK_EVERY_S)
        states = []
        for node in rundir.nodes_of(RunDir(path=self.folder)):
            try:
                states.append(operator_messages.ask(node, AskState()).state)
            except (ElastrainError, OSError, KeyError):  # it has ended, or has just been killed
                continue
        return (spare(states) or 0) if states else 0

    def gone(self, member: str) -> bool:
        return member in self.run.deaths_s or self.run.view_without(member) is not None

    @property
    def members(self) -> tuple[str, ...]:
        return self.run.views[-1].members

    @property
    def step(self) -> int:
        return max((member.passed[-1].step for member in self.run.members.values() if member.passed), default=-1)

    def last_words(self) -> str:
        lines = (self.folder / "output.log").read_text(errors="replace").splitlines()
        return " / ".join(line for line in lines if line.startswith("elastrain") or "Error" in line)[-3000:]

    def has_said(self, pattern: str) -> bool:
        """Whether the job's screen has such words."""
        return re.search(pattern, (self.folder / "output.log").read_text(errors="replace")) is not None

    # ------------------------------------------------------------------------------------------------------ striking

    def strike(self, cell: Cell, rank: int) -> Struck:
        """Bring the phase about and strike the member at `rank`, or what it stands for. Raises StrikeError."""
        if cell.phase == START:
            return self._at_the_start(cell.way)
        if cell.phase in IN_A_NEWCOMER:
            return self._in_a_newcomer(cell, rank)
        victims, before = self._victims(cell.way, rank), set(self._struck_so_far())
        if cell.phase in IN_EVERY_STEP:
            self._inject(cell.way, victims, f"step={self.step + AHEAD},phase={cell.phase}")
            return self._seen(cell, victims, before)
        if cell.phase in AT_THE_END:
            self._inject(cell.way, victims, f"step={self.steps},phase={cell.phase}")
            self.release()
            return self._seen(cell, victims, before)
        return self._after_a_loss(cell, victims)

    def inject(self, way: Way, rank: int, phase: str) -> str:
        """Ask for a fault at the next such phase, or at once, and wait for nothing. Its line. Raises StrikeError."""
        return self._inject(way, self._victims(way, rank), f"phase={phase}" if phase else "")

    def kill_all(self) -> tuple[str, ...]:
        """Every member of the newest view, as fast as one can."""
        members = self.members
        for member in members:
            self._kill(member)
        return members

    def end_soon(self) -> int:
        """Name the last step, so far ahead that every member reads of it in time; it. No step waits any more."""
        enough = min(self.step + STEPS_TO_THE_END, self.steps)
        if enough < self.steps:
            draft = self.folder / "enough.new"
            draft.write_text(str(enough))
            draft.replace(self.folder / "enough")
        self.release()
        return enough

    def release(self) -> None:
        """Micro-batches take their own time from now on."""
        (self.folder / "brake").unlink(missing_ok=True)

    def _at_the_start(self, way: Way) -> Struck:
        """By the faults file, before anybody could look; see `first_line`."""
        self.wait("the fault of the file has struck", lambda: bool(self._struck_so_far()), START_S)
        if not self._struck_so_far():
            raise StrikeError("the fault of the file did not strike")
        member, at_s = self._struck_so_far()[0]
        victims = (member,) if way.aim is Aim.MEMBER else self._of_its_node(member)
        return Struck(victims=victims, at_s=at_s)

    def _in_a_newcomer(self, cell: Cell, rank: int) -> Struck:
        """A member is killed, and what comes in its place meets the fault, or the job while it starts."""
        first = self.members[rank % len(self.members)]
        self._kill(first)
        self.wait(f"{first} is started again", lambda: first in self.run.replaces.values(), STRIKE_S)
        newcomer = next((new for new, old in self.run.replaces.items() if old == first), None)
        if newcomer is None:
            raise StrikeError(f"nothing was started in the place of {first}")
        if cell.way.aim is Aim.MEMBER:
            before = set(self._struck_so_far())
            self._inject(cell.way, (newcomer,), f"phase={cell.phase}")
            return self._seen(cell, (newcomer,), before, others=(first,))
        victims = self._victims(cell.way, rank + 1)
        self._inject(cell.way, victims, "")
        return Struck(victims=victims, others=(first,), at_s=time.monotonic())

    def _after_a_loss(self, cell: Cell, victims: tuple[str, ...]) -> Struck:
        """Phases that only the loss of somebody else brings about."""
        others = [member for member in self.members if member not in victims]
        if CLASSES[cell.way.kind].by is Carrier.LAUNCHER:
            # A worker of the node that is asked tells the launcher when the place is reached: it has to live.
            asked = rundir.nodes_of(RunDir(path=self.folder))[0].path.name
            others = [member for member in others if self.run.nodes[member] != asked] or others
        other, before = others[0], set(self._struck_so_far())
        self._inject(cell.way, victims, f"phase={cell.phase}")
        self._kill(other)
        return self._seen(cell, victims, before, others=(other,))

    def _victims(self, way: Way, rank: int) -> tuple[str, ...]:
        members = self.members
        rank %= len(members)
        if way.aim is Aim.ALL:
            return members
        if way.aim is Aim.TWO:
            return members[rank], members[(rank + 1) % len(members)]
        return (members[rank],) if way.aim is not Aim.NODE else self._of_its_node(members[rank])

    def _of_its_node(self, member: str) -> tuple[str, ...]:
        node = self.run.nodes[member]
        return tuple(each for each in self.run.views[-1].members if self.run.nodes[each] == node) or (member,)

    def _inject(self, way: Way, victims: Sequence[str], at: str) -> str:
        targets = self._targets(way, victims)
        line = f"{way.kind} {targets} {f'--at {at} ' if at else ''}{way.words}"
        try:
            answer = ask(RunDir(path=self.folder), grammar.parse(line))
        except (ElastrainError, OSError) as error:
            raise StrikeError(f"{line}: {error}") from None
        if not answer.ok:
            raise StrikeError(f"{line}: {answer.sentence}")
        return line

    def _targets(self, way: Way, victims: Sequence[str]) -> str:
        nodes = [self.run.nodes[victim] for victim in victims]
        match way.aim:
            case Aim.ETCD:
                return ""
            case Aim.LINK:
                other = next(node for node in sorted(self.run.agents) if node != nodes[0])
                return f"--target link:{nodes[0]}-{other}"
            case Aim.NODE:
                return f"--target node:{nodes[0]}"
        return "--target " + ",".join(f"member:{victim}" for victim in victims)

    def _seen(
        self, cell: Cell, victims: tuple[str, ...], before: set[tuple[str, float]], others: tuple[str, ...] = ()
    ) -> Struck:
        """Wait for the word of whoever came to the place, which all workers write down. `before`: it was asked for."""

        def struck() -> list[tuple[str, float]]:
            return [each for each in self._struck_so_far() if each not in before]

        if cell.phase in AT_THE_END:
            self.wait_for_the_end(lambda: bool(struck()))
        else:
            self.wait(f"{cell} strikes", lambda: bool(struck()), STRIKE_S)
        if not struck():
            raise StrikeError(f"the job ended before {cell} struck: {self.last_words()[-300:]}")
        return Struck(victims=victims, others=others, at_s=max(at_s for _, at_s in struck()))

    def _struck_so_far(self) -> list[tuple[str, float]]:
        return [(name, fault.at_s) for name, member in self.run.members.items() for fault in member.faults]

    def _kill(self, member: str) -> None:
        try:
            os.killpg(self.run.pids[member], signal.SIGKILL)
        except ProcessLookupError:
            raise StrikeError(f"{member} had gone before it was killed") from None


def first_line(way: Way) -> str:
    """For a file of faults: the way, aimed at the first commit."""
    target = "--target node:node1" if way.aim is Aim.NODE else "--target member:m1"
    return f"{way.kind} {target} --at step=0,phase=backward {way.words}\n"


def lasts_s(way: Way) -> float:
    """How long the fault goes on by itself; 0 where it does not end, or ends at once."""
    found = re.search(r"--for ([\d.]+)", way.words)
    return float(found[1]) if found else 0.0
