"""The arithmetic of a loss, and the demo's sentences and proof, on made-up journals. Times are in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastrain.job.batch import DataOrder
from experiments.demo import story
from experiments.demo.screen import sparkline
from experiments.journals import Member, Run, Tail, member_of, run_of
from experiments.recovery import figures

ORDER = DataOrder(dataset_size=10, global_batch_size=4, micro_batch_size=2)
"""Two micro-batches per step, one per run."""
Lines = list[dict[str, Any]]


def computed(step: int, run: int, start: float, end: float) -> dict[str, Any]:
    return {"event": "micro_batch", "step": step, "micro_batch": run, "run": run, "started_s": start, "t": end}


def passed(step: int, at: float, *, samples: int = 4, fingerprint: int | None = None) -> dict[str, Any]:
    print_ = figures.step_fingerprint(ORDER, step) if fingerprint is None else fingerprint
    told = {"loss": 3.0 - step / 10, "samples": samples, "fingerprint": print_, "generation": 1}
    return {"event": "passed", "step": step, "t": at, **told}


def step_of(step: int, run: int, start: float) -> Lines:
    """A member's undisturbed step of one second: computing for 0.9 s, then waiting for the others."""
    return [computed(step, run, start, start + 0.9), passed(step, start + 0.95), advance(step, start + 0.95)]


def advance(step: int, at: float) -> dict[str, Any]:
    return {"event": "advance", "step": step, "t": at}


def view(generation: int, at: float, *members: str) -> dict[str, Any]:
    return {"event": "view", "generation": generation, "t": at, "members": list(members), "reason": ""}


def start(member: str, at: float, slot: int) -> dict[str, Any]:
    return {"event": "worker_start", "member": member, "pid": 1, "t": at, "slot": slot, "source": "agent:node0"}


def a_run_with_one_loss() -> Run:
    """m0 and m1 train; m1 dies at 3.5 in step 3, m0 does its run too; m2 comes in its place in step 5.

    Steps 0..2 take from 0 to 3. Step 3 takes until 5.2: 0.9 s of its own, 1.0 s again, 0.3 s more than usual.
    """
    lost = {"event": "lost", "peer": "m1", "t": 3.504}
    resumed = {"event": "resumed", "generation": 2, "t": 3.524}
    m0 = [line for step in range(3) for line in step_of(step, 0, float(step))]
    m0 += [computed(3, 0, 3.0, 3.9), lost, resumed, computed(3, 1, 4.05, 5.05), passed(3, 5.2), advance(3, 5.2)]
    m0 += [computed(4, 0, 5.25, 6.15), computed(4, 1, 6.15, 7.05), passed(4, 7.1), advance(4, 7.1)]
    m0 += [computed(5, 0, 7.35, 8.25), passed(5, 9.1), advance(5, 9.1)]
    m0 += [computed(6, 0, 9.2, 10.1), passed(6, 10.15), advance(6, 10.15)]
    m0 += [{"event": "finished", "step": 7, "digest": "abc", "t": 10.2}]
    m1 = [line for step in range(3) for line in step_of(step, 1, float(step))]
    m1 += [{"event": "fault", "step": 3, "phase": "backward", "t": 3.5}]
    m2 = [computed(5, 1, 7.36, 9.05), passed(5, 9.1), advance(5, 9.1), computed(6, 1, 9.15, 10.1), passed(6, 10.15)]
    m2 += [{"event": "finished", "step": 7, "digest": "abc", "t": 10.2}]
    events = [start("m0", -5, 0), start("m1", -5, 1), view(1, -0.1, "m0", "m1")]
    events += [{"event": "death", "member": "m1", "detected_s": 3.503, "t": 3.51}, view(2, 3.51, "m0")]
    events += [start("m2", 3.6, 1), view(3, 7.0, "m0", "m2")]
    return run_of(events, {"m0": m0, "m1": m1, "m2": m2})


def alone(steps: int = 7, digest: str = "abc") -> Member:
    lines = [passed(step, float(step)) for step in range(steps)]
    return member_of([*lines, {"event": "finished", "step": steps, "digest": digest, "t": 9.0}], "m0")


@pytest.fixture
def run() -> Run:
    return a_run_with_one_loss()


@pytest.fixture
def loss(run: Run) -> figures.Loss:
    return figures.loss_of(run, "m1", 3.5, runs=2)


# ----------------------------------------------------------------------------------------------------------------- gaps


def test_the_longest_gap_is_the_longest_stretch_that_no_span_touches() -> None:
    assert figures.longest_gap_s([(0, 1), (0.5, 2), (2.25, 3), (3.125, 4)], 0.5, 4) == 0.25


def test_a_gap_is_cut_at_both_ends_of_the_window() -> None:
    assert figures.longest_gap_s([(0, 1), (9, 10)], 2, 5) == 3
    assert figures.longest_gap_s([(0, 3)], 2, 5) == 2
    assert figures.longest_gap_s([(4, 9)], 2, 5) == 2
    assert figures.longest_gap_s([], 2, 5) == 3


def test_a_span_inside_a_longer_one_opens_no_gap() -> None:
    assert figures.longest_gap_s([(0, 10), (1, 2)], 0, 10) == 0


# ------------------------------------------------------------------------------------------------------------- one loss


def test_detection_is_the_first_to_know_agent_or_survivor(loss: figures.Loss) -> None:
    assert loss.detect_s == pytest.approx(0.003)


def test_recovery_ends_with_the_last_survivor_that_resumed(run: Run) -> None:
    assert figures.loss_of(run, "m1", 3.5, runs=2).comm_recovery_s == pytest.approx(0.021)


def test_a_survivor_that_never_resumed_is_an_error(run: Run) -> None:
    del run.members["m0"].resumed_s[2]
    with pytest.raises(ValueError, match="0 of 1 survivors"):
        figures.loss_of(run, "m1", 3.5, runs=2)


def test_a_death_without_a_new_view_is_an_error(run: Run) -> None:
    del run.views[1:]
    with pytest.raises(ValueError, match="no view without it"):
        figures.loss_of(run, "m1", 3.5, runs=2)


def test_overhead_is_what_neither_the_usual_step_nor_the_redone_runs_explain(loss: figures.Loss) -> None:
    assert loss.step == 3
    assert loss.redone_s == pytest.approx(1.0)
    assert loss.overhead_s == pytest.approx((5.2 - 2.95) - 1.0 - 1.0)


def test_only_runs_beyond_the_own_quota_count_as_redone(run: Run) -> None:
    assert figures.time_of_extra_runs_s(run.members["m0"], 3, quota=(0, 1)) == 0.0


def test_the_interrupted_step_is_the_lowest_that_a_survivor_had_still_to_end(run: Run) -> None:
    m0, m1 = run.members["m0"], run.members["m1"]
    m1.advanced_s[3] = 3.4
    assert figures.interrupted_step([m0, m1], 3.5) == 3
    assert figures.interrupted_step([m1], 3.5) == 4


def test_a_step_whose_beginning_is_unknown_has_no_wall_time(run: Run) -> None:
    assert figures.step_wall_s([run.members["m0"]], 4) == pytest.approx(1.9)
    assert figures.step_wall_s([run.members["m2"]], 5) is None


def test_standstill_ends_with_the_next_steps_first_micro_batch(loss: figures.Loss) -> None:
    assert loss.standstill_s == pytest.approx(0.2)  # from 5.05 to 5.25


def test_the_victims_computing_does_not_hide_a_standstill(run: Run) -> None:
    run.members["m1"].take(computed(3, 1, 5.0, 5.3))
    assert figures.loss_of(run, "m1", 3.5, runs=2).standstill_s == pytest.approx(0.2)


def test_undisturbed_steps_lie_wholly_in_one_view(run: Run) -> None:
    assert [figures.undisturbed_steps(run, view) for view in run.views] == [[1, 2], [], []]


def test_the_ordinary_gap_between_steps_is_known(run: Run) -> None:
    assert figures.undisturbed_standstills_s(run, run.views[0]) == [pytest.approx(0.1)]


# ---------------------------------------------------------------------------------------------------------- coming back


def test_a_rejoin_costs_what_a_survivor_waits_beyond_its_habit(run: Run) -> None:
    rejoin = figures.rejoin_of(run, "m2")
    assert rejoin is not None
    assert rejoin.step == 5
    assert rejoin.entry_stall_s == pytest.approx(0.3)  # no undisturbed pair of steps in the second view to compare with
    assert rejoin.standstill_s == pytest.approx(0.3)
    assert rejoin.first_step_stall_s == rejoin.stall_s == pytest.approx(0.95)
    assert rejoin.warm_up_s == pytest.approx(7.36 - 3.6)


def test_a_newcomer_that_never_computed_has_no_rejoin(run: Run) -> None:
    run.members["m2"].micro_batches.clear()
    assert figures.rejoin_of(run, "m2") is None


# -------------------------------------------------------------------------------------------------------- the whole run


def test_a_step_passed_twice_or_a_number_that_falls_is_a_lost_step(run: Run) -> None:
    assert figures.steps_lost(run.members.values()) == 0
    run.members["m0"].take(passed(6, 11.0))
    run.members["m2"].take(passed(4, 11.0))
    assert figures.steps_lost(run.members.values()) == 2


def test_a_step_that_nobody_passed_is_found(run: Run) -> None:
    assert figures.uncommitted(run.members.values(), 9) == [7, 8]


@pytest.mark.parametrize(
    "told",
    [
        {"fingerprint": figures.step_fingerprint(ORDER, 3)},
        {"samples": 3},
        {"fingerprint": (figures.step_fingerprint(ORDER, 2) + ORDER.fingerprint(2, 1)) % 2**64, "samples": 6},
    ],
    ids=["another step's samples", "one too few", "a micro-batch twice"],
)
def test_samples_that_are_not_the_steps_own_are_found(told: dict[str, int]) -> None:
    right, wrong = member_of([passed(1, 1.0)], "m0"), member_of([passed(2, 2.0, **told)], "m1")
    assert figures.wrong_samples([right, wrong], ORDER) == [2]


def test_the_loss_curve_takes_each_step_when_the_first_member_knew_it(run: Run) -> None:
    curve = figures.loss_curve(run.members.values())
    assert [step for _, step, _ in curve] == list(range(7))
    assert curve[5][0] == 9.1


# -------------------------------------------------------------------------------------------------- reading and telling


def test_a_line_that_is_still_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    whole, torn = json.dumps({"a": 1}), json.dumps({"b": 2})
    path.write_text(f"{whole}\n{torn[:3]}")
    assert tail.read() == [{"a": 1}]
    path.write_text(f"{whole}\n{torn}\n")
    assert tail.read() == [{"b": 2}]


def test_the_story_tells_kill_recovery_and_return_in_order(run: Run) -> None:
    told = [sentence.text for sentence in story.sentences(run)]
    assert told == [
        "2 members train",
        "m1 is killed in backward of step 3",
        "m0 knew after 3.0 ms and went on after 24 ms",
        "m2 is started in the place of m1",
        "m2 is in: m0 m2",
    ]


def held(run: Run, reference: Member, held_out: tuple[str, str] = ("2.9", "2.9")) -> bool:
    claims = story.proof(run, reference, ORDER, steps=7, held_out=held_out)
    return all(claim.holds is not False for claim in claims)


def test_the_proof_holds_for_a_run_that_lost_nothing(run: Run) -> None:
    assert held(run, alone())


def test_the_proof_fails_on_one_member_with_another_digest(run: Run) -> None:
    run.members["m2"].digest = "abd"
    assert not held(run, alone())


def test_the_proof_fails_when_the_undisturbed_run_ended_elsewhere(run: Run) -> None:
    assert not held(run, alone(digest="abd"))


def test_the_proof_fails_without_an_end(run: Run) -> None:
    for member in run.members.values():
        member.digest = None
    assert not held(run, alone())


def test_the_proof_fails_on_a_repeated_step(run: Run) -> None:
    run.members["m0"].take(passed(6, 11.0))
    assert not held(run, alone())


def test_the_proof_fails_on_other_samples(run: Run) -> None:
    run.members["m0"].take(passed(7, 11.0, samples=5))
    assert not held(run, alone())


@pytest.mark.parametrize("printed", [("2.9", "2.8"), ("none", "none")])
def test_the_proof_fails_unless_both_held_out_losses_are_there_and_equal(run: Run, printed: tuple[str, str]) -> None:
    assert not held(run, alone(), printed)


def test_a_sparkline_spans_the_range_of_all_values() -> None:
    assert sparkline([4.0, 3.0, 2.0, 1.0], width=2) == "▃▁"
    assert sparkline([], width=5) == ""
