"""What a storm draws, when it may take somebody away, and how it judges: all without a process."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.journals import Run, run_of
from experiments.storm import cases, models, processes, surroundings
from experiments.storm.cases import LOSSES, Case, draw
from experiments.storm.oracle import difference, read_steps, unfinished
from experiments.storm.permission import Mismatches, may_lose, spare
from experiments.storm.processes import Processes
from experiments.storm.strikes import Striker
from experiments.storm.surroundings import Infrastructure
from tests.support.waiting import until

MANY = [draw(seed) for seed in range(800)]


def test_a_seed_draws_the_same_case_every_time() -> None:
    assert [draw(seed) for seed in range(50)] == MANY[:50]
    assert len({case.to_json() for case in MANY}) == len(MANY)


def test_a_case_goes_through_its_file_unchanged() -> None:
    assert [Case.from_json(case.to_json()) for case in MANY[:50]] == MANY[:50]


@pytest.mark.parametrize(
    ("part", "field", "values"),
    [
        ("model", "shape", cases.SHAPES),
        ("model", "norm", cases.NORMS),
        ("model", "frozen", cases.FROZEN),
        *[("model", field, (False, True)) for field in ("tied", "unused", "empty", "sometimes", "checkpointing")],
        ("model", "dtype", cases.DTYPES),
        ("model", "dropout", (0.0, 0.1, 0.5)),
        ("training", "optimizer", cases.OPTIMIZERS),
        ("training", "scheduler", cases.SCHEDULERS),
        ("training", "weight", cases.WEIGHTS),
        ("training", "draws", cases.DRAWS),
        ("training", "slow", cases.SLOW),
        ("training", "backups", (0, 1, 2, "all")),
        ("training", "run_length", (1, 2, 3, 4)),
        ("training", "micro_batches", range(1, 14)),
        ("training", "max_grad_norm", (None, 0.5)),
        ("training", "uneven", (False, True)),
    ],
)
def test_every_kind_of_model_and_training_is_drawn(part: str, field: str, values: tuple[object, ...]) -> None:
    assert {getattr(getattr(case, part), field) for case in MANY} == set(values)


def test_every_kind_of_fault_is_drawn_on_every_size_of_job() -> None:
    assert {(case.nodes, case.workers) for case in MANY} == {(1, 2), (1, 3), (1, 4), (1, 5), (3, 3)}
    struck = {(fault.kind, fault.target) for case in MANY for fault in case.faults}
    stopped = {("stop", target) for target in ("member", "newcomer", "loader", "agent", "node", "etcd")}
    assert struck == stopped | {("kill", target) for target in ("member", "newcomer", "loader", "agent", "node", "all")}
    assert {fault.stopped_s for case in MANY for fault in case.faults if fault.kind == "stop"} == {1.0, 6.0}
    assert any(later.commits == 0 for case in MANY for _, later in itertools.pairwise(case.faults))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("stages", {1, 2}),
        ("memory", set(surroundings.MEMORY)),
        ("spills", {False, True}),
        ("checkpoints", set(surroundings.CHECKPOINTS)),
        ("every", {"", *surroundings.EVERY}),
    ],
)
def test_every_kind_of_start_is_drawn(field: str, values: set[object]) -> None:
    assert {getattr(case.started, field) for case in MANY} == values


def test_all_are_killed_only_where_there_is_something_to_go_back_to() -> None:
    struck = [case for case in MANY if any(fault.target == "all" for fault in case.faults)]
    assert struck
    assert all(case.started.checkpoints != "none" for case in struck)


def test_a_tight_limit_is_what_was_held_and_a_little_more(tmp_path: Path) -> None:
    started = Infrastructure(memory="tight", slack_bytes=8, spills=True, checkpoints="local", every="1", stages=2)
    peaks = surroundings.peaks_of([[{"event": "memory", "peak_bytes": n}, {"event": "room"}] for n in (100, 130)])
    assert surroundings.limit_of(started, peaks, writing_bytes=1000) == 1138
    assert surroundings.limit_of(replace(started, checkpoints="none"), peaks, writing_bytes=1000) == 138
    told = " ".join(started.options(tmp_path, 1138)).replace(str(tmp_path), "")
    assert told == (
        "--stages 2 --memory-limit 1138 --offload-dir /spilled --checkpoint-dir /checkpoints --checkpoint-layout local"
        " --checkpoint-every 1"
    )
    assert surroundings.PLAIN.options(tmp_path, None) == ()


def test_without_backups_nobody_is_killed_who_holds_state() -> None:
    without = [case for case in MANY if case.training.backups == 0]
    assert without
    later = [f for case in without for f in case.faults if f.when != "start"]
    assert not [f for f in later if f.kind == "kill" and f.target in (*LOSSES, "newcomer")]


def test_there_are_steps_for_every_fault() -> None:
    assert all(case.training.steps >= cases.ROOM_FOR_COMMITS * (len(case.faults) + 1) for case in MANY)


@pytest.mark.parametrize("case", [replace(case) for case in MANY[:12]], ids=lambda case: str(case.seed))
def test_a_drawn_model_trains(case: Case) -> None:
    torch.manual_seed(0)
    net, data = models.build(case), models.Samples(case.model)
    optimizer = models.build_optimizer(net, case.training)
    models.build_scheduler(optimizer, case.training)
    size = case.training.micro_batch_size
    inputs, labels = torch.utils.data.default_collate([data[index] for index in range(size)])
    loss, weight = models.loss_of(net(models.as_input(inputs, case.model)), labels, case.training)
    loss.backward()
    optimizer.step()
    assert bool(loss.isfinite())
    assert 1 <= float(weight) <= labels.numel()


# ------------------------------------------------------------------------------------------------------- permission


def passed(step: int, generation: int) -> dict[str, object]:
    told = {"loss": 0.0, "samples": 1, "fingerprint": 0}
    return {"event": "passed", "t": float(step), "step": step, "generation": generation, **told}


def run_with(*, generation: int, commits: int) -> Run:
    """Three members in the newest view, in which so many steps were committed."""
    view = {"event": "view", "t": 0.0, "generation": generation, "members": ["m0", "m1", "m2"], "reason": ""}
    starts = [
        {"event": "worker_start", "t": 0.0, "member": member, "slot": slot, "pid": slot}
        for slot, member in enumerate(("m0", "m1", "m2"))
    ]
    return run_of([*starts, view], {"m0": [passed(step, generation) for step in range(commits)]})


@pytest.mark.parametrize(("left", "tries"), [(1, 1), (0, 0)])
def test_nobody_is_struck_once_the_last_step_is_committed(
    left: int, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script has finished its work then, and a kill of that is an error."""
    case = next(case for case in map(draw, range(100)) if case.faults[0].when == "random")
    run: Any = SimpleNamespace(run=run_with(generation=1, commits=case.training.steps - left))
    tried: list[object] = []
    monkeypatch.setattr(Striker, "_try", lambda _self, fault, _now_s: tried.append(fault))
    Striker(case=case, folder=tmp_path, processes=Processes("none"), follower=run).look()
    assert len(tried) == tries


def test_a_loss_is_allowed_that_every_shard_survives() -> None:
    assert may_lose(["m1"], run=run_with(generation=2, commits=2), spare=1, doubts=()).yes


def test_the_last_copy_is_never_taken() -> None:
    answer = may_lose(["m1"], run=run_with(generation=2, commits=9), spare=0, doubts=())
    assert not answer.yes
    assert answer.reason == "1 would be gone, and every shard survives the loss of 0"


def test_who_was_struck_counts_until_a_view_is_without_it() -> None:
    run = run_with(generation=2, commits=9)
    doubts = Mismatches()
    doubts.strike(["m0", "m9"], float("inf"))
    assert doubts.now(run, 100.0) == {"m0"}
    assert not may_lose(["m1"], run=run, spare=1, doubts=doubts.now(run, 100.0)).yes
    assert may_lose(["m1"], run=run, spare=2, doubts=doubts.now(run, 100.0)).yes, "two at once"


def test_who_was_only_stopped_counts_until_it_was_heard_again() -> None:
    run = run_with(generation=2, commits=9)
    doubts = Mismatches()
    doubts.strike(["m0"], 10.0)
    assert doubts.now(run, 9.0) == {"m0"}
    assert doubts.now(run, 10.0) == set()


def test_a_new_view_gets_two_commits_before_the_next_loss() -> None:
    assert not may_lose(["m1"], run=run_with(generation=3, commits=1), spare=1, doubts=()).yes


def test_nobody_is_taken_while_the_job_does_not_say_how_redundant_it_is() -> None:
    assert not may_lose(["m1"], run=run_with(generation=2, commits=9), spare=None, doubts=()).yes
    assert may_lose([], run=run_with(generation=2, commits=0), spare=None, doubts=()).yes, "a loader holds nothing"


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["every shard survives the loss of 2 more"], 2),
        (["every shard survives the loss of 1 more, copying"], 1),
        (["some shards are held by one member only, copying"], 0),
        (["some shards have no living holder"], 0),
        ([""], None),
        (["every shard survives the loss of 2 more", "every shard survives the loss of 1 more", ""], 1),
    ],
)
def test_the_most_careful_agent_is_believed(words: list[str], number: int | None) -> None:
    assert spare([{"generation": 4, "redundancy": told} for told in words]) == number


def test_agents_with_an_older_view_are_not_asked() -> None:
    old, new = "some shards are held by one member only", "every shard survives the loss of 1 more"
    assert spare([{"generation": 3, "redundancy": old}, {"generation": 4, "redundancy": new}]) == 1


# ----------------------------------------------------------------------------------------------------------- verdict

ALONE = [f"{step} d{step} 0.5 1.0 False 0.1" for step in range(4)]


def test_equal_lines_are_no_difference_whoever_came_when() -> None:
    assert difference({"m0": ALONE, "m3": ALONE[2:]}, ALONE) == ""
    assert unfinished({"m0": ALONE, "m1": ALONE[:2]}, ALONE) == ""


def test_the_first_step_that_differs_is_named_with_both_values() -> None:
    wrong = [*ALONE[:2], "2 other 0.5 1.0 False 0.1", "3 other 0.5 1.0 False 0.1"]
    assert difference({"m0": ALONE, "m1": wrong, "m2": wrong[2:]}, ALONE) == (
        "step 2: digest of m1 is other, alone d2 (likewise wrong: m2); 2 steps differ"
    )


def test_a_wrong_loss_under_a_right_digest_is_a_difference() -> None:
    assert (
        difference({"m0": ["1 d1 0.7 1.0 False 0.1"]}, ALONE) == "step 1: loss of m0 is 0.7, alone 0.5; 1 steps differ"
    )


def test_a_job_that_says_it_is_finished_before_the_last_step_is_found() -> None:
    assert unfinished({"m0": ALONE[:3], "m1": []}, ALONE).startswith("no member has come to step 3")


def test_a_line_that_a_kill_cut_short_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "m1.txt").write_text("0 d0 0.5 1.0 False 0.1\n1 d")
    assert read_steps(tmp_path) == {"m1": ALONE[:1]}


# ---------------------------------------------------------------------------------------------------------- processes


def test_what_a_run_leaves_behind_is_found_and_ended_and_nothing_else_is_touched(tmp_path: Path) -> None:
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    run.mkdir()
    temporary.mkdir()
    (run / "secret").touch()
    (temporary / "forgotten").touch()
    left = subprocess.Popen(["sleep", "60"], env={**os.environ, processes.MARK: "ours"})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, processes.MARK: "theirs"})
    try:
        ours = processes.Processes("ours")
        # Its environment can be read only once the kernel has laid the new program out, shortly after Popen returns.
        until(lambda: ours.all() == [left.pid], what="a program that can be read")
        found = processes.leftovers(ours, run, temporary, "", settle_s=0.0)
        assert found == (
            f"process {left.pid}: sleep 60",
            f"file {run / 'secret'}",
            f"file {temporary / 'forgotten'}",
        )
        assert not ours.signal(other.pid, signal.SIGKILL)
        ours.end()
        assert left.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()
