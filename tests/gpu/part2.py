"""Test part 2: seconds of a recovery and of a join, and members whose device fails or hangs."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.accelerator.jobs import Job, Ran
from experiments.accelerator.models import Training
from experiments.recovery.figures import loss_of, rejoin_of, standstill_s
from tests.gpu.parts import Setting, newcomers, tells

STRUCK = 6
"""Step in which a member is struck."""


def training(setting: Setting, **fields: Any) -> Training:
    """Return the training of all jobs of this part: many steps, at full pace, which wait for no newcomer."""
    steps = 20 if setting.small else 44
    return setting.training(**{"steps": steps, "meters": True, "wait_from": steps, **fields})


@tells("standstill_s", "join_s", "recovered_equal")
def recovery(setting: Setting) -> None:
    """Kill members at full pace; then wait for the first replacement."""
    kills = (5, 10) if setting.small else (8, 20, 32)
    faults = [f"kill --target member:m{number} --at step={step},phase=backward" for number, step in enumerate(kills, 1)]
    given = training(setting, members=len(kills) + 1, wait_from=kills[-1] + 4)
    ran = told(setting, "recovered_equal", Job(training=given, faults=faults, losses=len(kills)), joined=True)
    losses = [
        loss_of(ran.run, member.id, member.faults[0].at_s, runs=given.micro_batches)
        for member in ran.run.members.values()
        if member.faults
    ]
    found = [loss.standstill_s for loss in losses]
    setting.tell("standstill_s", statistics.median(found), note=", ".join(f"{each:.3f}" for each in found))
    rejoins = [rejoin for each in newcomers(ran) if (rejoin := rejoin_of(ran.run, each.id)) is not None]
    stalls = ", ".join(f"{rejoin.standstill_s:.3f}" for rejoin in rejoins)
    setting.tell("join_s", rejoins[0].warm_up_s, note=f"standstill at its entry: {stalls} s")


def told(setting: Setting, key: str, job: Job, *, joined: bool = False) -> Ran:
    """Run a job, and tell whether it has the digest of the job of one. Raises EndedError unless it ends well."""
    ran = setting.run(key, job)
    setting.tell(key, *setting.judged(ran, joined=joined))
    return ran


@tells("error_contained", "error_continued_s", "error_named")
def illegal_access(setting: Setting) -> None:
    """Let one of two members read where it may not."""
    ran = told(setting, "error_contained", struck(setting, "device error"))
    setting.tell("error_continued_s", standstill_s([ran.run.members["m0"]], STRUCK, moment(ran)))
    setting.tell("error_named", named(setting, ran.output), note=said(ran.output))


@tells("oom_named")
def no_memory(setting: Setting) -> None:
    """Let one of two members ask for more memory than there is."""
    ran = setting.run("oom", struck(setting, "out of memory"))
    equal, note = setting.judged(ran)
    setting.tell("oom_named", equal and named(setting, ran.output), note=note or said(ran.output))


@tells("hang_equal", "hang_found_s")
def hangs(setting: Setting) -> None:
    """Let a stream never end, and a loop; one after the other, because a device that is busy slows others down."""
    stream = told(setting, "hang_equal", struck(setting, "stream hangs"))
    loop = setting.run("loop", struck(setting, "loop hangs"))
    found = [ran.run.deaths_s["m1"] - moment(ran) for ran in (stream, loop)]
    setting.tell("hang_found_s", found[0] - found[1], note=f"stream {found[0]:.2f} s, loop {found[1]:.2f} s")


@tells("node_equal")
def node_lost(setting: Setting) -> None:
    """Kill one of two simulated nodes."""
    if setting.nodes:
        given = training(setting, members=2, wait_from=STRUCK + 2)
        faults = [f"kill --target node:node1 --at step={STRUCK}"]
        told(setting, "node_equal", Job(training=given, nodes=2, faults=faults, losses=1))


def struck(setting: Setting, what: str) -> Job:
    """Return a job of two members whose second one is struck."""
    given = training(setting, members=2, troubles=(("m1", STRUCK, what),))
    return Job(training=given, losses=1)


def moment(ran: Ran) -> float:
    """Return the monotonic time at which the member was struck."""
    return float((ran.folder / "struck").read_text())


def named(setting: Setting, output: str) -> bool:
    """Return True if a job's output has the name of the device, and its UUID if there is one."""
    return setting.name in output and setting.uuid in output


def said(output: str) -> str:
    """Return the lines of a job's output about errors and memory."""
    lines = [line.strip() for line in output.splitlines() if "rror" in line or "memory" in line]
    return " / ".join(lines)[:600]
