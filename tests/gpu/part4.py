"""Test part 4: pipelines of two and three stages on one device, and the loss of a member at each place."""

from __future__ import annotations

from functools import partial

from tests.gpu.parts import Setting, tells

PLACES = {"first": "m0", "middle": "m1", "last": "m2"}


@tells("stages_equal")
def undisturbed(setting: Setting) -> None:
    """Run pipelines of two and of three stages."""
    alone = setting.undisturbed()
    counts = (2, 3)
    jobs = setting.together(
        *(partial(setting.job, f"stages{count}", count, options=["--stages", str(count)]) for count in counts)
    )
    for count, job in zip(counts, jobs, strict=True):
        setting.compare("stages_equal", f"{count} stages", lambda job=job: job.result().equals(alone))


@tells("stages_killed_equal")
def killed(setting: Setting) -> None:
    """Kill the member at each place of a pipeline of three, and one of four members in two pipelines."""
    alone = setting.undisturbed()
    phases = {"first": "forward", "middle": "backward", "last": "commit"}
    calls = {
        place: partial(
            setting.job,
            f"killed-{place}",
            3,
            options=["--stages", "3"],
            faults=[f"kill --target member:{member} --at step=4,phase={phases[place]}"],
        )
        for place, member in PLACES.items()
    }
    fault = "kill --target member:m1 --at step=4,phase=backward"
    calls["two pipelines"] = partial(setting.job, "killed-two", 4, options=["--stages", "2"], faults=[fault])
    for place, job in zip(calls, setting.together(*calls.values()), strict=True):
        setting.compare("stages_killed_equal", place, lambda job=job: job.result().equals(alone))
