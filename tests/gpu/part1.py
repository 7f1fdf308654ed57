"""Test part 1: the README's script on a device. Two runs, members, a kill and a join, stages, bfloat16, autocast."""

from __future__ import annotations

from experiments.accelerator.jobs import Job
from tests.gpu.parts import Setting, tells

KILL = ("kill --target member:m1 --at step=3,phase=backward",)


@tells("runs_equal")
def two_runs(setting: Setting) -> None:
    """Run the script twice."""
    value, note = setting.equal("again", Job(training=setting.training()))
    setting.tell("runs_equal", value, note=note)


@tells("members_equal")
def members(setting: Setting) -> None:
    """Run jobs of 2 and of 4 members."""
    jobs = {f"{count} members": Job(training=setting.training(members=count)) for count in (2, 4)}
    setting.compare("members_equal", jobs)


@tells("digest_equal")
def killed_and_stages(setting: Setting) -> None:
    """Run a pipeline, and jobs that lose a member and get another one: in float32, in bfloat16, with autocast."""
    kinds = {"": (3, "killed and joined"), "bf16": (2, "bf16, killed and joined")}
    kinds["autocast"] = (2, "autocast, killed and joined")
    killed = {
        case: Job(training=setting.training(kind, members=count), faults=KILL, losses=1)
        for kind, (count, case) in kinds.items()
    }
    setting.compare("digest_equal", {"2 stages": Job(training=setting.training(members=2), stages=2)})
    setting.compare("digest_equal", killed, joined=True)
