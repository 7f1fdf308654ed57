"""The jobs of the table: which models in which ways, and what strikes which member when."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from elastrain.job.world import PHASES
from experiments.accelerator.jobs import Job, Ran, run_job
from experiments.accelerator.models import SETUPS, WITHOUT_STAGES, Training

IN_A_STEP = ("forward", "backward", "reduce", "commit", "apply", "publish")
STEPS = 14
"""Steps of the longest job."""
STEP, LATER = 2, 4
"""Steps in which members are struck: the later one where agents have to know the job's pace."""
EVERY = 2
"""Steps between two checkpoints."""
RESUMED = {"written on the device, resumed on the CPU": ("late", "cpu"), "the reverse": ("cpu", "late")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job whose lines have to be those of the job of one on the CPU."""

    key: str
    """The row of the table that the case belongs to."""
    name: str
    job: Job
    resumed_on: str = ""
    """All processes are killed after a checkpoint, and the job goes on on this device."""


def all_cases(device: str) -> list[Case]:
    """Return every case of the rows of the table that compare digests."""
    plain = Training(device=device)
    found = [*_of_models(plain), *_of_losses(plain), *_of_saved(plain)]
    for stage in range(3):
        found += _of_losses(plain, stage=stage)
    for name, (written, resumed) in RESUMED.items():
        first, second = (device if each == "late" else each for each in (written, resumed))
        for stages, members in ((1, 1), (1, 2), (2, 2)):
            training = Training(device=first, members=members, steps=8, pause_s=0.05)
            what = f"{name}: {members} members, {stages} stages"
            found.append(
                Case(key="resumed_equal", name=what, job=Job(training=training, stages=stages), resumed_on=second)
            )
    return found + _of_shared(plain)


def _of_shared(plain: Training) -> list[Case]:
    """Return jobs whose members read each other's device memory in place: undisturbed, and with every loss above."""
    plain = replace(plain, shared="trusted")
    ways = (", 3 members", ", 3 stages")
    found = [case for case in _of_models(plain) if case.name.endswith(ways)]
    found += [*_of_losses(plain), *_of_losses(plain, stage=1)]
    three = Training(device=plain.device, members=3)
    cramped, killed = replace(three, shared="cramped"), (f"kill --target member:m1 --at step={STEP},phase=reduce",)
    lossy = replace(cramped, steps=10, backups="all", pause_s=0.02)
    found += [
        Case(key="", name="gpt, 3 members, probed", job=Job(training=replace(three, shared="probed"))),
        Case(key="", name="little room, 3 members", job=Job(training=cramped)),
        Case(key="", name="little room, 3 stages", job=Job(training=cramped, stages=3)),
        _case("little room, killed in reduce", lossy, killed, stages=1, where=""),
    ]
    return [replace(case, key="shared_equal", name=f"in place: {case.name}") for case in found]


def _of_models(plain: Training) -> list[Case]:
    ways = {"1 member": (1, 1), "3 members": (3, 1), "2 stages": (2, 2), "3 stages": (3, 3)}
    return [
        Case(
            key="digest_equal_cpu",
            name=f"{model}, {way}",
            job=Job(training=replace(plain, model=model, members=members), stages=stages),
        )
        for model in SETUPS
        for way, (members, stages) in ways.items()
        if stages == 1 or model not in WITHOUT_STAGES
    ]


def _of_saved(plain: Training) -> list[Case]:
    """Return loops with `save_on_disk`: undisturbed, and with a loss while activations lie on the drive."""
    training = replace(plain, members=3, steps=10, backups="all", pause_s=0.02, saved=True)
    quiet = Case(key="digest_equal_cpu", name="save_on_disk, 3 members", job=Job(training=training))
    killed = (f"kill --target member:m1 --at step={STEP},phase=backward",)
    return [quiet, _case("save_on_disk, killed in backward", training, killed, stages=1, where="")]


def _of_losses(plain: Training, stage: int | None = None) -> list[Case]:
    """Return the losses of one member of three: of any job, or at one place of a pipeline of three stages."""
    victim, other = ("m1", "m2") if stage is None else (f"m{stage}", f"m{(stage + 1) % 3}")
    training = replace(plain, members=3, steps=10, backups="all", pause_s=0.02)
    stages = 1 if stage is None else 3
    where = "" if stage is None else f"stage {stage}: "
    make = partial(_case, stages=stages, where=where)
    found = [make(f"killed in {phase}", training, _faults(phase, victim, other, training)) for phase in PHASES]
    for what, step in (("device error", STEP), ("out of memory", STEP), ("stream hangs", LATER)):
        found.append(make(what, replace(training, troubles=((victim, step, what),))))
    whole_node = f"kill --target node:node{victim[1:]} --at step={STEP},phase=backward"
    found.append(make("a whole node is lost", replace(training, backups=1), (whole_node,), nodes=3))
    first = tuple((member, step, "killed") for member, step in ((victim, STEP),))
    if stage is None:
        training = replace(training, members=2, backups=1, steps=STEPS)
        first = (("m0", STEP, "killed"), ("m1", -1, "killed after the other"))
        found.append(
            make("two losses and two joins, until none of the first members is left", replace(training, troubles=first))
        )
    else:
        last = (other, -1, "killed after the other")
        found.append(make("two losses and two joins", replace(training, steps=STEPS, troubles=(*first, last))))
    return found


def _case(
    name: str, training: Training, faults: tuple[str, ...] = (), *, stages: int, where: str, nodes: int | None = None
) -> Case:
    job = Job(training=training, stages=stages, faults=faults, nodes=nodes, losses=len(faults or training.troubles))
    return Case(key="digest_equal", name=where + name, job=job)


def _faults(phase: str, victim: str, other: str, training: Training) -> tuple[str, ...]:
    """Return the lines of a faults file that kill a member in a phase."""
    if phase in IN_A_STEP:
        return (f"kill --target member:{victim} --at step={STEP},phase={phase}",)
    if phase == "shutdown":
        return (f"kill --target member:{victim} --at step={training.steps},phase=shutdown",)
    if phase == "join":  # the member that takes the place of the victim
        return (
            f"kill --target member:{victim} --at step={STEP},phase=backward",
            "kill --target member:m3 --at phase=join",
        )
    # Phases of a recovery, which the loss of another member brings about.
    return (
        f"kill --target member:{other} --at step={STEP},phase=backward",
        f"kill --target member:{victim} --at phase={phase}",
    )


def reference_of(training: Training) -> Training:
    """Return the undisturbed job of one on the CPU with which jobs of a model are compared, up to their last steps."""
    return Training(model=training.model, steps=STEPS, micro_batches=training.micro_batches, device="cpu")


def run_case(case: Case, folder: Path, **how: Any) -> list[Ran]:
    """Run the job of a case; one that is resumed is two jobs."""
    if not case.resumed_on:
        return [run_job(case.job, folder, **how)]
    written = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", str(EVERY))
    first = replace(case.job, options=written)
    events = folder / "first" / "run" / "events.jsonl"
    killed = run_job(first, folder / "first", kill_when=lambda: _has_checkpoint(events), **how)
    training = replace(case.job.training, device=case.resumed_on, pause_s=0)
    second = replace(first, training=training, options=(*written, "--accept-changes"))
    resumed = run_job(second, folder / "second", **how)
    resumed.before = killed
    return [killed, resumed]


def _has_checkpoint(events: Path) -> bool:
    if not events.exists():
        return False
    lines = [json.loads(line) for line in events.read_text().splitlines() if '"checkpoint"' in line]
    return any(line["event"] == "checkpoint" and not line.get("reason") for line in lines)
