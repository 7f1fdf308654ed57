"""Flipped bits in members of pipelines, early in a step: they are put right or harm nobody, and the bits stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.pipeline.test_pipelines import PIPELINED, lines, trained
from tests.support.training import assert_equal_to_undisturbed, undisturbed

WHERES = ("moments", "parameters", "taken", "backup", "partial", "gradient")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("workers", "stages"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("wheres", [WHERES[:3], WHERES[3:]], ids="-".join)
@pytest.mark.on_demand
def test_flipped_bits_change_no_loss_and_no_parameter_in_the_end(
    tmp_path: Path, wheres: tuple[str, ...], workers: int, stages: int, phase: str
) -> None:
    arguments = ("--steps", "16")
    # Each in a member of its own: after the second one a member ends, and is replaced.
    faults = tuple(
        f"flip --target member:m{place} --at step={3 + 4 * place},phase={phase} --where {where}"
        for place, where in enumerate(wheres)
    )
    run = trained(tmp_path, workers, stages, *arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments, script=PIPELINED)
    # Not what scripts saw of parameters: where an update is made again they have seen the wrong ones for a moment.
    steps = {line for told in lines(run, "steps").values() for line in told if len(line.split()) == 3}
    assert steps == set(lines(undisturbed(*arguments, script=PIPELINED), "steps")["alone"])
    assert {member for member, _, _ in run.phases_struck()} == {"m0", "m1", "m2"}
    assert set(run.digests) == {f"m{place}" for place in range(workers)}
