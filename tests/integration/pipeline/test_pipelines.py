"""Real workers under `elastrain run --stages N`: after every step the bits are those of a job of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.pipeline.figures import actions, pairs
from experiments.pipeline.present import whole
from tests.support.training import SCRIPT, SCRIPTS, Run, assert_equal_to_undisturbed, run_job, undisturbed

PIPELINED = SCRIPTS / "pipeline_training.py"


def computed(run: Run) -> dict[int, set[str]]:
    """Step -> members that have computed actions of tasks in it."""
    found: dict[int, set[str]] = {}
    for member, events in run.journals.items():
        for event in events:
            if event["event"] == "task":
                found.setdefault(event["step"], set()).add(member)
    return found


def lines(run: Run, what: str) -> dict[str, list[str]]:
    """Member -> its lines of `<what>-<member>.txt`."""
    prefix = f"{what}-"
    return {path.stem.removeprefix(prefix): path.read_text().splitlines() for path in run.folder.glob(f"{what}-*.txt")}


def assert_every_step_is_that_of_one(run: Run, *arguments: str) -> dict[str, set[str]]:
    """Loss and gradient norm of each step, the bits of each parameter on whoever has it, the whole model at the end.

    Each sample once. Returns what members have told of parameters.
    """
    assert_equal_to_undisturbed(run, *arguments, script=PIPELINED)
    alone = undisturbed(*arguments, script=PIPELINED)
    steps = {line for told in lines(run, "steps").values() for line in told if len(line.split()) == 3}
    # A member that was killed may have left half a line.
    assert sorted(steps, key=lambda line: int(line.split()[0])) == lines(alone, "steps")["alone"]
    told = {member: whole(its) for member, its in lines(run, "parameters").items()}
    assert set().union(*told.values()) <= set(lines(alone, "parameters")["alone"])
    evaluated = lines(run, "evaluated")
    assert evaluated.keys() == run.digests.keys() - {"alone"}
    assert all(each == lines(alone, "evaluated")["alone"] for each in evaluated.values())
    return told


def assert_nothing_is_missing(told: dict[str, set[str]], *arguments: str) -> None:
    """Of a job without losses: after every step each parameter was somewhere, with the bits of one worker."""
    alone = lines(undisturbed(*arguments, script=PIPELINED), "parameters")["alone"]
    assert set().union(*told.values()) == set(alone)


def had(told: dict[str, set[str]], step: int) -> dict[str, set[str]]:
    """Member -> the parameters that it had after the step."""
    return {member: {line.split()[1] for line in its if line.split()[0] == str(step)} for member, its in told.items()}


def trained(
    folder: Path,
    workers: int,
    stages: int,
    *arguments: str,
    faults: tuple[str, ...] = (),
    slow_until: str | None = None,
) -> Run:
    return run_job(
        folder,
        workers=workers,
        arguments=arguments,
        options=("--stages", str(stages)),
        script=PIPELINED,
        faults=faults,
        slow_until=slow_until,
    )


@pytest.mark.parametrize(
    ("workers", "stages", "case", "run_length"),
    [
        (3, 3, "gpt", 1),
        (4, 2, "checkpointed", 2),
        (2, 2, "positions", 1),
        (3, 3, "drawing", 1),
        (2, 2, "redrawing", 1),
        (2, 2, "sampling", 1),
        (3, 3, "dropped", 1),
        (2, 2, "ragged", 1),
        (2, 2, "written", 1),
        pytest.param(2, 2, "gpt", 2, marks=pytest.mark.on_demand),
        pytest.param(3, 2, "gpt", 1, marks=pytest.mark.on_demand),
        pytest.param(5, 3, "gpt", 1, marks=pytest.mark.on_demand),
        pytest.param(4, 4, "bfloat16", 1, marks=pytest.mark.on_demand),
        pytest.param(2, 2, "autocast-loop", 1, marks=pytest.mark.on_demand),
        pytest.param(3, 3, "unpreserved", 2, marks=pytest.mark.on_demand),
        pytest.param(3, 3, "encoder-decoder", 2, marks=pytest.mark.on_demand),
    ],
)
def test_pipelines_train_to_the_bits_of_a_job_of_one(
    tmp_path: Path, workers: int, stages: int, case: str, run_length: int
) -> None:
    arguments = ("--case", case, "--steps", "5", "--run-length", str(run_length))
    run = trained(tmp_path, workers, stages, *arguments)
    told = assert_every_step_is_that_of_one(run, *arguments)
    assert_nothing_is_missing(told, *arguments)
    everything = set().union(*had(told, 3).values())
    whole_ones = [member for member, names in had(told, 3).items() if len(names) == len(everything)]
    assert len(whole_ones) == (1 if (workers, stages) == (3, 2) else 0), "only a pipeline of one member has everything"
    # From the first step on each pipeline has a part of the runs, and nobody computes a run whole without a plan.
    assert computed(run).keys() == {0, 1, 2, 3, 4}
    assert all(len(members) == workers for members in computed(run).values())


def test_with_offloading_checkpointed_blocks_train_to_the_bits_of_a_job_of_one(tmp_path: Path) -> None:
    """Hooks for saved tensors stand around what checkpoints save: torch hands out other objects than it was given."""
    arguments = ("--case", "checkpointed", "--steps", "3")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ("--stages", "2", "--offload-dir", str(disk), "--memory-limit", "2GiB")
    run = run_job(tmp_path / "job", workers=2, arguments=arguments, options=options, script=PIPELINED)
    told = assert_every_step_is_that_of_one(run, *arguments)
    assert_nothing_is_missing(told, *arguments)
    assert all(len(members) == 2 for members in computed(run).values())
    assert list(disk.iterdir()) == [], "something was left behind"


STRIKES = ("forward", "backward", "reduce", "commit", "apply", "publish")
PLACES = [(phase, place) for phase in STRIKES for place in range(3)]
USUAL = {("forward", 1), ("backward", 2), ("publish", 0)}


@pytest.mark.parametrize(
    ("phase", "place"),
    [each if each in USUAL else pytest.param(*each, marks=pytest.mark.on_demand) for each in PLACES],
)
def test_a_loss_in_any_phase_at_any_place_of_a_pipeline_changes_no_bit(tmp_path: Path, phase: str, place: int) -> None:
    arguments = ("--steps", "8")
    # In one pipeline nobody else computes with a member's shards: published is what the first plan gives to others.
    step = 0 if phase == "publish" else 2
    fault = f"kill --target member:m{place} --at step={step},phase={phase}"
    run = trained(tmp_path, 3, 3, *arguments, faults=(fault,))
    assert_every_step_is_that_of_one(run, *arguments)
    assert [(member, at) for member, _, at in run.phases_struck()] == [(f"m{place}", phase)]
    assert_what_was_redone_is_told(run, step)


RECOVERY = [(phase, place) for phase in ("quiesce", "report", "decide", "complete") for place in range(3)]


@pytest.mark.parametrize(
    ("phase", "place"),
    [each if each == ("decide", 1) else pytest.param(*each, marks=pytest.mark.on_demand) for each in RECOVERY],
)
def test_a_second_loss_in_any_phase_of_the_recovery_changes_no_bit(tmp_path: Path, phase: str, place: int) -> None:
    arguments = ("--steps", "8", "--backups", "2")
    first = f"kill --target member:m{(place + 1) % 3} --at step=2,phase=forward"
    second = f"kill --target member:m{place} --at step=2,phase={phase}"
    run = trained(tmp_path, 3, 3, *arguments, faults=(first, second))
    assert_every_step_is_that_of_one(run, *arguments)
    struck = {(member, at) for member, _, at in run.phases_struck()}
    assert struck == {(f"m{(place + 1) % 3}", "forward"), (f"m{place}", phase)}


@pytest.mark.on_demand
@pytest.mark.parametrize(("lost", "place"), [("m1", 0), ("m2", 1), ("m0", 2)])
def test_a_loss_while_a_newcomer_takes_copies_changes_no_bit(tmp_path: Path, lost: str, place: int) -> None:
    """What is copied to it at the first two places is lost with who gives it, at the last one with the newcomer."""
    arguments = ("--steps", "12", "--backups", "2")
    second = [member for member in ("m0", "m1", "m2", "m3") if member != lost][place]
    faults = (
        f"kill --target member:{lost} --at step=2,phase=forward",
        f"kill --target member:{second} --at phase=copy",
    )
    run = trained(tmp_path, 3, 3, *arguments, faults=faults, slow_until="m3")
    assert_every_step_is_that_of_one(run, *arguments)
    assert {(member, at) for member, _, at in run.phases_struck()} == {(lost, "forward"), (second, "copy")}


@pytest.mark.parametrize("place", [0, *(pytest.param(other, marks=pytest.mark.on_demand) for other in (1, 2))])
def test_a_loss_on_the_way_into_the_loop_changes_no_bit(tmp_path: Path, place: int) -> None:
    arguments = ("--steps", "4")
    run = trained(tmp_path, 3, 3, *arguments, faults=(f"kill --target member:m{place} --at phase=join",))
    assert_every_step_is_that_of_one(run, *arguments)
    assert run.phases_struck() == [(f"m{place}", 0, "join")]


@pytest.mark.on_demand
def test_a_newcomer_that_is_lost_on_its_way_into_the_loop_changes_no_bit(tmp_path: Path) -> None:
    arguments = ("--steps", "12")
    faults = ("kill --target member:m1 --at step=2,phase=forward", "kill --target member:m3 --at phase=join")
    run = trained(tmp_path, 3, 3, *arguments, faults=faults, slow_until="m4")
    assert_every_step_is_that_of_one(run, *arguments)
    assert [(member, at) for member, _, at in run.phases_struck()] == [("m1", "forward"), ("m3", "join")]


ENDING = [(phase, place) for phase in ("shutdown", "publish") for place in range(3)]


@pytest.mark.parametrize(
    ("phase", "place"),
    [each if each == ("publish", 1) else pytest.param(*each, marks=pytest.mark.on_demand) for each in ENDING],
)
def test_a_loss_before_or_while_blocks_move_to_everybody_changes_no_bit(tmp_path: Path, phase: str, place: int) -> None:
    arguments = ("--steps", "4")
    # In one pipeline nobody needs what another has trained: of the last step, parameters are published after the loop.
    step = {"shutdown": 4, "publish": 3}[phase]
    run = trained(tmp_path, 3, 3, *arguments, faults=(f"kill --target member:m{place} --at step={step},phase={phase}",))
    assert_every_step_is_that_of_one(run, *arguments)
    assert run.phases_struck() == [(f"m{place}", step, phase)]


def assert_what_was_redone_is_told(run: Run, step: int) -> None:
    """The journals' (block, run) pairs that went backward twice, but what was in flight at the loss."""
    done = actions(run.journals)
    again = sum(count - 1 for count in pairs(done, step).values())
    (told,) = {
        sum(event["redone"] for event in events if event["event"] == "resumed" and event["generation"] > 1)
        for member, events in run.journals.items()
        if any(event["event"] == "finished" and event["step"] > step for event in events) and int(member[1:]) < 3
    }
    # Its maker has told a gradient when it is in memory, and its journal a moment later; one may be on its way.
    in_flight = max(each.end - each.begin for each in done if each.step == step)
    assert abs(told - again) <= in_flight, (told, again)
    assert sum(event["pairs"] for event in run.events if event["event"] == "redone") == told


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.on_demand), 1])
def test_a_loss_before_the_first_commit_changes_no_bit(tmp_path: Path, place: int) -> None:
    arguments = ("--steps", "3")
    fault = f"kill --target member:m{place} --at step=0,phase=backward"
    run = trained(tmp_path, 3, 3, *arguments, faults=(fault,))
    assert_every_step_is_that_of_one(run, *arguments)
    assert [(member, at) for member, _, at in run.phases_struck()] == [(f"m{place}", "backward")]
    assert computed(run)[0] >= {f"m{other}" for other in range(3) if other != place}


@pytest.mark.parametrize(
    ("case", "thaw_every"),
    [("dropped", 1), ("ragged", 1), pytest.param("transposed", 9, marks=pytest.mark.on_demand)],
)
def test_a_newcomer_gets_blocks_and_computes_them(tmp_path: Path, case: str, thaw_every: int) -> None:
    """It comes in a step that has other shapes than the first one, leaves a layer out, or freezes one."""
    arguments = ("--steps", "12", "--case", case, "--thaw-every", str(thaw_every))
    run = run_job(
        tmp_path,
        workers=3,
        arguments=arguments,
        options=("--stages", "3"),
        script=PIPELINED,
        faults=("kill --target member:m1 --at step=2,phase=forward",),
        slow_until="m3",
    )
    assert_every_step_is_that_of_one(run, *arguments)
    assert "m3" in computed(run)[11]


def test_two_neighbours_at_once_change_no_bit(tmp_path: Path) -> None:
    arguments = ("--steps", "6", "--backups", "2")
    faults = tuple(f"kill --target member:{member} --at step=2,phase=forward" for member in ("m1", "m2"))
    run = trained(tmp_path, 4, 4, *arguments, faults=faults)
    assert_every_step_is_that_of_one(run, *arguments)
    assert sorted(member for member, _, _ in run.phases_struck()) == ["m1", "m2"]


def test_a_script_with_loaders_groups_and_a_schedule_trains_in_pipelines_as_it_is(tmp_path: Path) -> None:
    arguments = ("--steps", "4")
    run = run_job(tmp_path, workers=2, arguments=arguments, options=("--stages", "2"))
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)


def test_a_block_that_comes_is_refused_until_its_values_are_here(tmp_path: Path) -> None:
    script = SCRIPTS / "adopting_training.py"
    run = run_job(tmp_path, workers=3, arguments=(), options=("--stages", "3", "--max-restarts", "0"), script=script)
    assert_equal_to_undisturbed(run, script=script)
    assert set(run.digests) == {"m0", "m2"}
    came = 0
    for its in lines(run, "tried").values():
        told = [line.split(maxsplit=2) for line in its]
        before, after = ({layer: what for at, layer, what in told if at == when} for when in ("coming", "here"))
        assert "NaN" not in {*before.values(), *after.values()}
        now_here = [layer for layer, what in after.items() if what == "values" and before[layer] != "values"]
        assert all("is not on this member" in before[layer] for layer in now_here)
        came += len(now_here)
    assert came, "somebody was given blocks while their script was looking"
