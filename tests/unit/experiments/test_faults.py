"""The list of cells, the promised answers, and the arithmetic of what became of them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from elastrain.job.world import PHASES
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.table import CLASSES
from experiments.faults import cells as table
from experiments.faults.cells import (
    CELLS_PER_JOB,
    QUICK,
    START,
    WAYS,
    Aim,
    Answer,
    Cell,
    Ground,
    Way,
    chosen,
    legal_cells,
    next_job,
    ordered,
    untried,
)
from experiments.faults.figures import (
    Outcome,
    blamed,
    detected_after_s,
    ended_after,
    figures,
    refusal,
    standstill_s,
    struck_s,
    without_flipped,
    without_put_right,
)
from experiments.journals import member_of, run_of
from experiments.storm.oracle import difference, unfinished

TARGETS = {
    Aim.MEMBER: "--target member:m1",
    Aim.TWO: "--target member:m1,member:m2",
    Aim.ALL: "--target member:m0,member:m1,member:m2,member:m3",
    Aim.NODE: "--target node:node1",
    Aim.LINK: "--target link:node0-node1",
    Aim.ETCD: "",
}


def cell(phase: str = "backward", **fields: object) -> Cell:
    return Cell(way=Way(kind="kill", **fields), phase=phase)  # type: ignore[arg-type]


def test_every_class_of_the_product_has_a_way_or_a_reason() -> None:
    assert untried() == []
    assert set(table.WITHOUT) <= set(CLASSES)


def test_every_legal_cell_is_a_line_that_the_product_takes() -> None:
    for legal in legal_cells():
        place = "step=0,phase=backward" if legal.phase == START else f"phase={legal.phase}"
        fault = grammar.parse(f"{legal.way.kind} {TARGETS[legal.way.aim]} --at {place} {legal.way.words}")
        assert fault.kind == legal.way.kind
        assert legal.phase in (*PHASES, START)


def test_no_two_ways_have_one_name_in_one_phase() -> None:
    names = Counter((each.way.name, each.phase) for each in legal_cells())
    assert [name for name, times in names.items() if times > 1] == []


def test_a_job_that_is_to_end_must_say_why() -> None:
    assert [way.name for way in WAYS if way.answer is not Answer.GOES_ON and not way.says] == []
    for way in WAYS:
        re.compile(way.says)


def test_views_of_a_later_life_of_the_job_count_though_their_numbers_begin_anew() -> None:
    def view(generation: int, *members: str) -> dict[str, object]:
        return {"event": "view", "generation": generation, "members": members, "reason": "", "t": 0.0}

    start = {"event": "start", "pid": 1}
    lines = [start, view(1, "m0"), view(2, "m0", "m1"), {**start, "life": 2}, view(1, "m2"), view(1, "m2")]
    assert [each.members for each in run_of(lines, {}).views] == [("m0",), ("m0", "m1"), ("m2",)]


def test_the_quick_set_has_a_cell_of_every_kind_and_at_least_twenty() -> None:
    found = chosen(legal_cells(), QUICK)
    assert len(found) == len(set(map(str, found))) >= 20
    assert {each.way.ground for each in found} == set(Ground)
    assert Answer.ENDS in {each.way.answer for each in found}
    with pytest.raises(KeyError):
        chosen(legal_cells(), [("kill", "lunch")])


def test_jobs_take_a_cell_that_needs_their_start_first_and_one_that_may_end_them_last() -> None:
    ends = [cell(phase="shutdown"), cell(answer=Answer.ENDS, says="x")]
    shared = [cell(phase=f"phase {number}") for number in range(CELLS_PER_JOB + 2)]
    left = ordered([*ends, cell(phase=START), *shared])
    jobs = []
    while left:
        count = next_job(left)
        jobs.append([each.phase for each in left[:count]])
        left = left[count:]
    assert jobs[0] == [START, *(f"phase {number}" for number in range(CELLS_PER_JOB - 1))]
    assert jobs[1] == [*(f"phase {number}" for number in range(CELLS_PER_JOB - 1, CELLS_PER_JOB + 2)), "shutdown"]
    assert len(jobs) == 3


def test_a_wrong_step_is_owed_to_the_last_cell_struck_before_it() -> None:
    outcomes = [Outcome(cell=cell(), struck_s=at_s) for at_s in (10.0, 20.0, None)]
    assert blamed(outcomes, 15.0) == 0
    assert blamed(outcomes, 25.0) == 1
    assert blamed(outcomes, 5.0) == 0, "wrong before any strike: the first one tells"
    assert blamed([], 5.0) is None


def test_a_standstill_is_the_longest_time_without_a_commit_since_the_strike() -> None:
    assert standstill_s([1.0, 2.0, 7.0, 8.0], 3.0, 9.0) == pytest.approx(4.0)
    assert standstill_s([1.0, 2.0], 3.0, 9.0) == pytest.approx(6.0)


def test_a_death_is_known_when_the_first_one_knows_it() -> None:
    start = {"event": "worker_start", "member": "m1", "pid": 1, "t": 0.0, "slot": 1, "source": "agent:node0"}
    death = {"event": "death", "member": "m1", "detected_s": 5.02, "t": 5.03}
    run = run_of([start, death], {})
    run.members["m0"] = member_of([{"event": "lost", "peer": "m1", "t": 5.01}], "m0")
    assert detected_after_s(run, "m1", 5.0) == pytest.approx(0.01)
    assert detected_after_s(run, "m0", 5.0) is None


def test_each_of_several_victims_is_known_from_its_own_strike_on() -> None:
    fault = {"event": "fault", "step": 1, "phase": "forward"}
    run = run_of([], {"m1": [{**fault, "t": 5.0}], "m2": [{**fault, "t": 5.4}], "m3": []})
    assert [struck_s(run, name, 6.0) for name in ("m1", "m2", "m3")] == [5.0, 5.4, 6.0]


def test_a_fault_that_found_nothing_to_strike_is_told() -> None:
    refused = {"event": "fault_refused", "kind": "flip", "reason": "nothing is held yet", "t": 5.0}
    run = run_of([], {"m1": [refused], "m2": []})
    assert refusal(run, ["m2", "m1", "m9"], 5.0) == "nothing is held yet"
    assert refusal(run, ["m1"], 5.1) == "", "of an earlier cell"
    outcome = Outcome(cell=cell(), nothing_struck="nothing is held yet")
    assert figures([outcome], usual_s=None, legal=1)["nothing_struck"] == ["kill in backward: nothing is held yet"]


def test_a_hang_behind_the_last_step_has_the_time_that_scripts_have_between_steps() -> None:
    hangs = [
        Outcome(cell=Cell(way=Way(kind="hang"), phase=at), detect_s=s) for at, s in (("forward", 2), ("shutdown", 31))
    ]
    found = figures(hangs, usual_s=0.5, legal=100)
    assert (found["detect_hang_s"], found["detect_hang_between_steps_s"]) == (2, 31)


def test_figures_count_what_failed_and_how() -> None:
    outcomes = [
        Outcome(cell=cell(), standstill_s=0.5, detect_s=0.01),
        Outcome(cell=cell(phase="commit"), reason="wrong", mismatch=True, standstill_s=9.0),
        Outcome(cell=Cell(way=Way(kind="hang"), phase="forward"), detect_s=2.0),
        Outcome(cell=Cell(way=Way(kind="hang", words="--for 0.5", loses=False), phase="forward"), detect_s=8.0),
        Outcome(cell=cell(answer=Answer.ENDS, says="x"), standstill_s=7.0),
    ]
    found = figures(outcomes, usual_s=0.5, legal=100)
    assert (found["cells"], found["passed"], found["failed"], found["digest_mismatches"]) == (5, 4, 1, 1)
    assert found["slowest_recovery_s"] == 0.5, "of those that went on as they should"
    assert (found["detect_crash_s"], found["detect_hang_s"], found["detect_hang_steps"]) == (0.01, 2.0, 4.0)
    assert found["detect_blackhole_s"] is None
    assert found["failed_cells"] == ["kill in commit: wrong"]


def test_a_member_lost_by_a_flipped_bit_may_tell_wrong_lines_from_that_bit_on_and_nobody_else() -> None:
    def view(generation: int, *members: str) -> dict[str, object]:
        return {"event": "view", "generation": generation, "t": 0.0, "members": list(members), "reason": ""}

    def passed(step: int, at_s: float) -> dict[str, object]:
        told = {"loss": 1.0, "samples": 1, "fingerprint": 1, "generation": 1}
        return {"event": "passed", "step": step, "t": at_s, **told}

    run = run_of([view(1, "m0", "m1"), view(2, "m0")], {"m1": [passed(0, 1.0), passed(1, 2.0), passed(2, 3.0)]})
    lines = {"m0": ["0 a", "1 b", "2 c"], "m1": ["0 a", "1 x", "2 y"]}
    found = without_flipped(lines, run, {"m1": 2.5, "m0": 2.5})
    assert found == {"m0": ["0 a", "1 b", "2 c"], "m1": ["0 a"]}, "m0 was not lost: all of its lines count"


def test_a_step_that_the_job_took_back_itself_counts_for_nobody_and_the_next_one_does() -> None:
    wrong = "the state of shard 2 after step 1 differs between its primary m1 and its backup m0: m1 is wrong"
    views = [
        {"event": "view", "generation": number, "t": 0.0, "members": ["m0"], "reason": reason}
        for number, reason in enumerate(("m2 joined", f"step anew: {wrong}, and has published it"), 1)
    ]
    assert without_put_right({"m0": ["0 a", "1 x", "2 c"]}, run_of(views, {})) == {"m0": ["0 a", "2 c"]}
    views[1]["reason"] = "step anew: m4 was to take over shard 1 after step 1: what m4 keeps has changed in its memory"
    assert without_put_right({"m0": ["0 a", "1 x", "2 c"]}, run_of(views, {})) == {"m0": ["0 a", "2 c"]}
    again = (
        "m1 has made the update again, from what both had before, and gets what m0 has: its own was wrong in its memory"
    )
    views[1]["reason"] = f"step anew: {wrong.replace('m1 is wrong', again)}"
    assert without_put_right({"m0": ["0 a", "1 x", "2 c"]}, run_of(views, {})) == {"m0": ["0 a", "2 c"]}
    views[1]["reason"] = f"step anew: {wrong}"
    assert len(without_put_right({"m0": ["0 a", "1 x", "2 c"]}, run_of(views, {}))["m0"]) == 3, "nobody had got it"


def test_where_the_last_step_was_taken_back_the_line_of_the_end_shows_that_it_was_put_right() -> None:
    wrong = "the state of shard 2 after step 1 differs between its primary m1 and its backup m0: m1 is wrong"
    reason = f"step anew: {wrong}, and has published it"
    run = run_of([{"event": "view", "generation": 1, "t": 0.0, "members": ["m0"], "reason": reason}], {})
    alone = ["0 a 1 1 False 1", "1 b 1 1 False 1", "2 b"]

    def told(*end: str) -> dict[str, list[str]]:
        return without_put_right({"m0": [alone[0], "1 x 1 1 False 1", *end]}, run)

    assert (difference(told("2 b"), alone), unfinished(told("2 b"), alone)) == ("", "")
    assert "digest of m0 is x, alone b" in difference(told("2 x"), alone)
    assert "no member has come to step 2" in unfinished(told(), alone)


def test_a_job_that_is_ended_earlier_is_held_to_as_many_steps_of_the_undisturbed_one() -> None:
    lines = ["0 a 1.0", "1 b 0.9", "2 c 0.8", "3 c"]
    assert ended_after(2, lines) == ["0 a 1.0", "1 b 0.9", "2 b"]
    assert ended_after(3, lines) == ended_after(240, lines) == lines
