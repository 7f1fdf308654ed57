"""Test part 2: seconds of a recovery and of a join, and members whose device fails or hangs."""

from __future__ import annotations

import statistics

from experiments.journals import Member
from experiments.recovery.figures import loss_of, rejoin_of, standstill_s
from tests.gpu.parts import Job, Setting, tells

RUNS = 8
"""Runs of micro-batches per step of the training script."""
STRUCK = 6
"""Step in which a member is struck."""


def steps(setting: Setting) -> list[str]:
    """Return the number of steps of all jobs of this part, as arguments."""
    return ["--steps", "20" if setting.small else "44"]


def undisturbed(setting: Setting) -> Member:
    """Return the job of one with these steps."""
    return setting.undisturbed(*steps(setting))


@tells("standstill_s", "join_s", "recovered_equal")
def recovery(setting: Setting) -> None:
    """Kill members at full pace; then wait for the first replacement."""
    kills = (5, 10) if setting.small else (8, 20, 32)
    members = len(kills) + 1
    faults = [f"kill --target member:m{number} --at step={step},phase=backward" for number, step in enumerate(kills, 1)]
    arguments = [*steps(setting), "--hold-from", str(kills[-1] + 4)]
    job = setting.job("recovery", members, *arguments, faults=faults, hold=True, limit_s=90)
    equal, note = job.joined(undisturbed(setting), members)
    setting.tell("recovered_equal", equal, note=note)
    losses = [
        loss_of(job.run, member.id, member.faults[0].at_s, runs=RUNS)
        for member in job.run.members.values()
        if member.faults
    ]
    found = [loss.standstill_s for loss in losses]
    setting.tell("standstill_s", statistics.median(found), note=", ".join(f"{each:.3f}" for each in found))
    rejoins = [rejoin for each in job.newcomers(members) if (rejoin := rejoin_of(job.run, each.id)) is not None]
    stalls = ", ".join(f"{rejoin.standstill_s:.3f}" for rejoin in rejoins)
    setting.tell("join_s", rejoins[0].warm_up_s, note=f"standstill at its entry: {stalls} s")


@tells("error_contained", "error_continued_s", "error_named")
def illegal_access(setting: Setting) -> None:
    """Let one of two members read where it may not."""
    alone = undisturbed(setting)
    job = struck(setting, "illegal")
    setting.compare("error_contained", "", lambda: job.equals(alone))
    setting.tell("error_continued_s", standstill_s([job.run.members["m0"]], STRUCK, moment(job)))
    setting.tell("error_named", named(setting, job.output), note=said(job.output))


@tells("oom_named")
def no_memory(setting: Setting) -> None:
    """Let one of two members ask for more memory than there is."""
    job = struck(setting, "oom")
    equal, note = job.equals(undisturbed(setting))
    setting.tell("oom_named", equal and named(setting, job.output), note=note or said(job.output))


def struck(setting: Setting, what: str) -> Job:
    """Run a job of two members whose second one is struck."""
    arguments = [*steps(setting), "--do", what, "--at", str(STRUCK), "--member", "m1"]
    return setting.job(what, 2, *arguments, limit_s=60)


def moment(job: Job) -> float:
    """Return the monotonic time at which the member was struck."""
    return float((job.folder / "run" / "struck").read_text())


def named(setting: Setting, output: str) -> bool:
    """Return True if a job's output has the name of the device, and its UUID if there is one."""
    return setting.name in output and setting.uuid in output


def said(output: str) -> str:
    """Return the lines of a job's output about errors and memory."""
    lines = [line.strip() for line in output.splitlines() if "rror" in line or "memory" in line]
    return " / ".join(lines)[:600]


@tells("hang_equal", "hang_found_s")
def hangs(setting: Setting) -> None:
    """Let a stream never end, and a loop; one after the other, because a device that is busy slows others down."""
    alone = undisturbed(setting)
    stream, loop = (struck(setting, what) for what in ("stream", "loop"))
    equal, note = stream.equals(alone)
    setting.tell("hang_equal", equal, note=note)
    found = [job.run.deaths_s["m1"] - moment(job) for job in (stream, loop)]
    setting.tell("hang_found_s", found[0] - found[1], note=f"stream {found[0]:.2f} s, loop {found[1]:.2f} s")


@tells("node_equal")
def node_lost(setting: Setting) -> None:
    """Kill one of two simulated nodes."""
    if not setting.nodes:
        return
    arguments = [*steps(setting), "--hold-from", str(STRUCK + 2)]
    faults = [f"kill --target node:node1 --at step={STRUCK}"]
    job = setting.job("node", 1, *arguments, options=["--local-nodes", "2"], faults=faults, hold=True, limit_s=90)
    equal, note = job.equals(undisturbed(setting))
    setting.tell("node_equal", equal, note=note)
