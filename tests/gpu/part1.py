"""Test part 1: the README's script on a device. Two runs, members, a kill and a join, stages, bfloat16, autocast."""

from __future__ import annotations

from functools import partial

from tests.gpu.parts import Setting, tells

KILL = "kill --target member:m1 --at step=3,phase=backward"


@tells("runs_equal")
def two_runs(setting: Setting) -> None:
    """Run the script twice."""
    first, second = (each.result() for each in setting.together(setting.undisturbed, partial(setting.alone, "again")))
    setting.tell("runs_equal", first.digest == second.digest is not None, note=f"{first.digest}, {second.digest}")


@tells("members_equal")
def members(setting: Setting) -> None:
    """Run jobs of 2 and of 4 members."""
    alone = setting.undisturbed()
    jobs = setting.together(*(partial(setting.job, f"members{count}", count) for count in (2, 4)))
    for count, job in zip((2, 4), jobs, strict=True):
        setting.compare("members_equal", f"{count} members", lambda job=job: job.result().equals(alone))


@tells(("digest_equal", "killed and joined"), ("digest_equal", "2 stages"))
def killed_and_stages(setting: Setting) -> None:
    """Run a job that loses a member and gets another one, and a pipeline."""
    alone = setting.undisturbed()
    killed, staged = setting.together(
        partial(setting.job, "killed", 3, faults=[KILL], hold=True),
        partial(setting.job, "stages", 2, options=["--stages", "2"]),
    )
    setting.compare("digest_equal", "killed and joined", lambda: killed.result().joined(alone, 3))
    setting.compare("digest_equal", "2 stages", lambda: staged.result().equals(alone))


@tells(("digest_equal", "bf16, killed and joined"), ("digest_equal", "autocast, killed and joined"))
def precisions(setting: Setting) -> None:
    """Run the script in bfloat16 and with autocast, alone and with a kill."""
    names = ("bf16", "autocast")
    alone = setting.together(*(partial(setting.alone, f"{name}-alone", f"--{name}") for name in names))
    jobs = setting.together(
        *(partial(setting.job, f"{name}-killed", 2, f"--{name}", faults=[KILL], hold=True) for name in names)
    )
    for name, one, job in zip(names, alone, jobs, strict=True):
        setting.compare(
            "digest_equal", f"{name}, killed and joined", lambda one=one, job=job: job.result().joined(one.result(), 2)
        )
