"""Test part 7: device memory that peers read in place, and exporters that are killed while peers read."""

from __future__ import annotations

import json

from experiments.accelerator import commands
from experiments.accelerator.commands import EndedError
from experiments.accelerator.in_place import reads_in_place
from experiments.accelerator.jobs import Job
from tests.gpu.part1 import KILL
from tests.gpu.parts import Setting, tells

ROUNDS, REHEARSED_ROUNDS = 100, 4
"""Exporters that are killed."""
KILLED_S = 150.0
"""Seconds that all of them may take."""


@tells("shared_equal")
def shared(setting: Setting) -> None:
    """Run jobs of 2 and 4 members that read each other's memory in place, and one that loses a member."""
    kinds = {
        "2 members": Job(training=setting.training(members=2, shared="probed")),
        "4 members": Job(training=setting.training(members=4, shared="probed")),
        "killed and joined": Job(training=setting.training(members=3, shared="probed"), faults=KILL, losses=1),
        "2 stages": Job(training=setting.training(members=2, shared="probed"), stages=2),
    }
    for case, job in kinds.items():
        try:
            ran = setting.run(f"shared {case}", job)
        except EndedError as error:
            setting.tell("shared_equal", None, case, str(error))
            continue
        value, note = setting.judged(ran, joined=bool(job.losses))
        found = reads_in_place(ran)
        if not all(found.values()):
            value, note = False, f"not read in place by {', '.join(m for m, reads in found.items() if not reads)}"
        setting.tell("shared_equal", value, case, note)


@tells("exporter_killed")
def killed(setting: Setting) -> None:
    """Kill exporters in the middle of a kernel, one after the other, beside one process that reads on."""
    rounds = REHEARSED_ROUNDS if setting.small else ROUNDS
    command = ["-m", "tests.gpu.killed_exporters", setting.device, str(rounds)]
    text = commands.run("the reader", command, setting.folder / "killed.txt", deadline_s=setting.limited(KILLED_S))
    found = json.loads(text.splitlines()[-1])
    note = f"{found['equal']} of {found['rounds']} exporters; {found['seconds']:.1f} s"
    setting.tell("exporter_killed", found["equal"] == rounds, note=note)
