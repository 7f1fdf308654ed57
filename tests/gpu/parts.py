"""Test parts: what they share. A part is a module with functions marked by `tells`, which run jobs and tell values."""

from __future__ import annotations

import importlib
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from experiments.accelerator.commands import EndedError, Once
from experiments.accelerator.jobs import Job, Ran, run_job
from experiments.accelerator.models import Training
from experiments.journals import Member
from tests.gpu.claims import CLAIMS, REHEARSED
from tests.support import warm

Tell = Callable[[str, str, object, str, bool], None]
"""Key, case, value, note, and whether the case was not run."""
LIMIT_S = 90.0
"""The longest time of a job."""


@dataclass(kw_only=True)
class Setting:
    """One run of one test part."""

    device: str
    """Torch's name of the kind."""
    folder: Path
    until_s: float
    """Monotonic time at which the part has to have ended."""
    tell_line: Tell
    name: str = ""
    """The device's name."""
    uuid: str = ""
    nodes: bool = True
    """Return True if the libraries for simulated nodes are there."""
    told: set[tuple[str, str]] = field(default_factory=set)
    alones: Once = field(default_factory=Once)

    @property
    def small(self) -> bool:
        """True for a device that shows nothing: sizes and numbers are those of a rehearsal."""
        return self.device in REHEARSED

    @property
    def start(self) -> Callable[..., Any]:
        """Return the function that starts a process: cold, and in a rehearsal from one that has imported torch."""
        return warm.Popen if self.small else subprocess.Popen

    @property
    def left_s(self) -> float:
        """Seconds until the part has to have ended."""
        return self.until_s - time.monotonic()

    def limited(self, limit_s: float) -> float:
        """Return the seconds that a process may take."""
        return max(0.0, min(limit_s * (3 if self.small else 1), self.left_s))

    def tell(self, key: str, value: object, case: str = "", note: str = "") -> None:
        """Tell a value of a claim's case."""
        self.told.add((key, case))
        self.tell_line(key, case, value, note, False)

    def training(self, kind: str = "", **fields: Any) -> Training:
        """Return a training of the model whose bits are compared."""
        model = f"{'rehearsal' if self.small else 'bits'}{kind and ' '}{kind}"
        settings = {"device": self.device, "steps": 10, "micro_batches": 8, "micro_batch_size": 4, "wait_from": 4}
        return Training(**{"model": model, **settings, **fields})

    def run(self, name: str, job: Job) -> Ran:
        """Run a job. Raises EndedError unless it ends well in time."""
        limit_s = self.limited(LIMIT_S)
        ran = run_job(job, self.folder / name, deadline_s=limit_s, start=self.start)
        if ran.code != 0:
            raise EndedError(f"{name} {ran.end()}" + (f" after {limit_s:.0f} s" if ran.code is None else ""))
        return ran

    def alone(self, training: Training) -> Ran:
        """Return the undisturbed job of one with which a job of a training is compared; it runs once per part."""
        wanted = replace(training, members=1, troubles=(), wait_from=0, meters=False)
        name = f"alone-{wanted.model}-{blake2b(wanted.to_json().encode(), digest_size=6).hexdigest()}"
        found: Ran = self.alones.get(wanted, lambda: self.run(name, Job(training=wanted)))
        return found

    def equal(self, name: str, job: Job, *, joined: bool = False) -> tuple[object, str]:
        """Run a job, and judge it. None: it, or the job of one, did not end well."""
        try:
            return self.judged(self.run(name, job), joined=joined)
        except EndedError as error:
            return None, str(error)

    def judged(self, ran: Ran, *, joined: bool = False) -> tuple[object, str]:
        """Return whether a job has the digests and samples of the job of one (with a newcomer), and why not."""
        amiss = ran.amiss(self.alone(ran.job.training))
        amiss.pop("leftovers", None)  # a driver may leave files
        if joined and not newcomers(ran):
            amiss["joined"] = "nobody joined"
        return not amiss, "; ".join(f"{key}: {value}" for key, value in amiss.items())

    def compare(self, key: str, jobs: Mapping[str, Job], *, joined: bool = False) -> None:
        """Run jobs at the same time, as many as there are cores for, and tell for each case whether it is equal."""
        calls = [
            lambda case=case, job=job: self.equal(f"{key} {case}", job, joined=joined) for case, job in jobs.items()
        ]
        for case, (value, note) in zip(jobs, self.together(*calls), strict=True):
            self.tell(key, value, case, note)

    def together(self, *calls: Callable[[], Any], beside: int = 0) -> list[Any]:
        """Make calls at the same time, `beside` of them or as many as there are cores for, and return their values."""
        beside = beside or (1 if self.small else max(1, min(4, (os.cpu_count() or 1) // 4)))
        with ThreadPoolExecutor(beside) as pool:
            return [each.result() for each in [pool.submit(call) for call in calls]]


def newcomers(ran: Ran) -> list[Member]:
    """Return the members beyond the first ones that have computed."""
    first = ran.job.training.members
    return [each for each in ran.run.members.values() if int(each.id.removeprefix("m")) >= first and each.micro_batches]


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
