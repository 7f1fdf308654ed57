"""Test parts: what they share. A part is a module with functions marked by `tells`, which run jobs and tell values."""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TypeVar

from experiments.journals import Member, Run, read_member, read_run
from tests.gpu import processes
from tests.gpu.claims import CLAIMS
from tests.gpu.processes import EndedError

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
REHEARSED = ("late", "cpu")
"""Devices that show nothing."""
TRAIN = str(HERE / "train.py")
Tell = Callable[[str, str, object, str, bool], None]
"""Key, case, value, note, and whether the case was not run."""


@dataclass(kw_only=True)
class Setting:
    """One run of one test part."""

    device: str
    """Torch's name of the kind."""
    folder: Path
    environment: Mapping[str, str]
    until_s: float
    """Monotonic time at which the part has to have ended."""
    tell_line: Tell
    name: str = ""
    """The device's name."""
    uuid: str = ""
    nodes: bool = True
    """Return True if the libraries for simulated nodes are there."""
    told: set[tuple[str, str]] = field(default_factory=set)
    _undisturbed: Member | EndedError | None = None
    _once: Lock = field(default_factory=Lock)

    @property
    def small(self) -> bool:
        """True for a device that shows nothing: sizes and numbers are those of a rehearsal."""
        return self.device in REHEARSED

    @property
    def left_s(self) -> float:
        """Seconds until the part has to have ended."""
        return self.until_s - time.monotonic()

    def tell(self, key: str, value: object, case: str = "", note: str = "") -> None:
        """Tell a value of a claim's case."""
        self.told.add((key, case))
        self.tell_line(key, case, value, note, False)

    def run(
        self, name: str, command: Sequence[str], *, limit_s: float = 60.0, code: int = 0, **variables: str
    ) -> processes.Ended:
        """Run a Python process with a time limit, which also ends with the part. Raises EndedError."""
        environment = {**self.environment, **variables}
        limit_s = min(limit_s * (3 if self.small else 1), self.left_s)
        return processes.run(name, command, self.folder / name, environment, limit_s=limit_s, code=code)

    def alone(self, name: str, *arguments: str, limit_s: float = 60.0) -> Member:
        """Run the training script as a job of one."""
        folder = self.folder / name
        (folder / "run").mkdir(parents=True)
        variables = {
            "ELASTRAIN_RUN_DIR": str(folder / "run"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }  # as workers have it
        self.run(name, [TRAIN, *self.script(arguments)], limit_s=limit_s, **variables)
        return read_member(folder / "run")

    def undisturbed(self, *arguments: str) -> Member:
        """Return the job of one that most cases are compared with; it runs once per part, with the same arguments."""
        with self._once:
            if self._undisturbed is None:
                try:
                    self._undisturbed = self.alone("undisturbed", *arguments)
                except EndedError as error:
                    self._undisturbed = error
        if isinstance(self._undisturbed, EndedError):
            raise self._undisturbed
        return self._undisturbed

    def job(
        self,
        name: str,
        members: int,
        *arguments: str,
        options: Sequence[str] = (),
        faults: Sequence[str] = (),
        limit_s: float = 75.0,
        hold: bool = False,
    ) -> Job:
        """Run the training script in a job of several members per node, with faults.

        hold: True to slow the script down until the first newcomer computes.
        """
        folder = self.folder / name
        folder.mkdir(parents=True)
        if hold:
            (folder / "hold").touch()
            arguments = (*arguments, "--hold", str(folder / "hold"), "--members", str(members))
        plan: list[str] = []
        if faults:
            (folder / "faults.txt").write_text("\n".join(faults) + "\n")
            plan = ["--faults", str(folder / "faults.txt")]
        command = ["-m", "elastrain.launcher", "run", "--nproc-per-node", str(members), *plan, *options]
        command += ["--run-dir", str(folder / "run"), TRAIN, *self.script(arguments)]
        ended = self.run(name, command, limit_s=limit_s)
        return Job(run=read_run(folder / "run"), output=ended.output, folder=folder)

    def script(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of the training script."""
        return ["--device", self.device, *(["--small"] if self.small else []), *arguments]

    def together(self, *calls: Callable[[], T], beside: int = 0) -> list[Future[T]]:
        """Make calls at the same time, `beside` of them or as many as there are cores for, and wait for all."""
        beside = beside or (1 if self.small else max(1, min(4, (os.cpu_count() or 1) // 4)))
        with ThreadPoolExecutor(beside) as pool:
            return [pool.submit(call) for call in calls]

    def compare(self, key: str, case: str, make: Callable[[], tuple[object, str]]) -> None:
        """Tell the value and the note that a function makes, or what kept a process of it from its end."""
        try:
            value, note = make()
        except EndedError as error:
            value, note = None, str(error)
        self.tell(key, value, case, note)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that has ended well."""

    run: Run
    output: str
    folder: Path

    @property
    def digests(self) -> set[str | None]:
        """The digests of all members that reached the end."""
        return {member.digest for member in self.run.members.values() if member.ended_at_step is not None}

    def newcomers(self, first: int) -> list[Member]:
        """Return the members beyond the first ones that have computed."""
        members = self.run.members.values()
        return [each for each in members if int(each.id.removeprefix("m")) >= first and each.micro_batches]

    def joined(self, alone: Member, first: int) -> tuple[bool, str]:
        """Return whether a newcomer has computed and all ended with the digest of the job of one, and why not."""
        equal, note = self.equals(alone)
        return equal and bool(self.newcomers(first)), note or ("" if self.newcomers(first) else "nobody joined")

    def equals(self, alone: Member) -> tuple[bool, str]:
        """Return whether all members ended with the digest of the job of one, and the digests if not."""
        equal = self.digests == {alone.digest} and alone.digest is not None
        return equal, "" if equal else f"{sorted(map(str, self.digests))}, alone {alone.digest}"


Case = Callable[[Setting], None]


def tells(*claims: str | tuple[str, str]) -> Callable[[Case], Case]:
    """Mark a function of a part with the keys, or keys and cases, that it tells."""
    pairs = [each for each in claims if isinstance(each, tuple)]
    pairs += [(each, case) for each in claims if isinstance(each, str) for case in CLAIMS[each].cases]

    def mark(function: Case) -> Case:
        function.tells = tuple(pairs)  # type: ignore[attr-defined]
        return function

    return mark


def cases_of(part: int) -> list[Case]:
    """Return the functions of a part in the order of its module."""
    module = importlib.import_module(f"tests.gpu.part{part}")
    return [each for each in vars(module).values() if hasattr(each, "tells")]


def run_part(part: int, setting: Setting, keys: Sequence[str] = ()) -> None:
    """Run a part. Each case is told: by its function, or as what kept it from being told."""
    for case in cases_of(part):
        pairs: tuple[tuple[str, str], ...] = case.tells  # type: ignore[attr-defined]
        if keys and not {key for key, _ in pairs} & set(keys):
            continue
        why, not_run = "", False
        if setting.left_s < 5:
            why, not_run = "not run: the time of this run is over", True
        else:
            try:
                case(setting)
                why, not_run = "not run", True
            except EndedError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001 - a mistake in one case must not end the run
                why = f"{type(error).__name__}: {error}; {traceback.format_exc(limit=-2)}"
        for key, name in pairs:
            if (key, name) not in setting.told:
                setting.tell_line(key, name, None, why, not_run)
