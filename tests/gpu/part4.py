"""Test part 4: pipelines of two and three stages on one device, and the loss of a member at each place."""

from __future__ import annotations

from experiments.accelerator.jobs import Job
from tests.gpu.parts import Setting, tells

PLACES = {"first": ("m0", "forward"), "middle": ("m1", "backward"), "last": ("m2", "commit")}


@tells("stages_equal")
def undisturbed(setting: Setting) -> None:
    """Run pipelines of two and of three stages."""
    jobs = {f"{count} stages": Job(training=setting.training(members=count), stages=count) for count in (2, 3)}
    setting.compare("stages_equal", jobs)


@tells("stages_killed_equal")
def killed(setting: Setting) -> None:
    """Kill the member at each place of a pipeline of three, and one of four members in two pipelines."""
    places = {place: (3, 3, *who) for place, who in PLACES.items()} | {"two pipelines": (4, 2, "m1", "backward")}
    jobs = {
        place: Job(
            training=setting.training(members=members),
            stages=stages,
            faults=[f"kill --target member:{member} --at step=4,phase={phase}"],
            losses=1,
        )
        for place, (members, stages, member, phase) in places.items()
    }
    setting.compare("stages_killed_equal", jobs)
