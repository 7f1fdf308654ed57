"""The arithmetic of the peers' standstills, on journals written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.recovery.peers.standstill import Cost, Life, Lives, cost_of, costs, kills, survivors, undisturbed_s

VICTIM = Life(rank=1, ticks_s=[9.5, 10.0], killed_s=10.0)


def survivor(rank: int = 0, *, ticks_s: list[float], steps_s: list[tuple[float, float]]) -> Life:
    return Life(rank=rank, ticks_s=ticks_s, steps_s=steps_s)


def test_standstill_is_the_longest_time_without_a_tick_of_anybody() -> None:
    one = survivor(ticks_s=[10.1, 10.2, 13.0, 14.0], steps_s=[(10.2, 13.0), (13.0, 14.0)])
    other = survivor(2, ticks_s=[11.0, 11.5], steps_s=[])
    assert cost_of([one, other], 10.0).standstill_s == pytest.approx(1.5)


def test_standstill_begins_with_the_kill_and_ends_with_two_further_steps() -> None:
    one = survivor(
        ticks_s=[5.0, 12.0, 12.5, 13.0, 99.0], steps_s=[(5.0, 6.0), (11.0, 12.5), (12.5, 13.0), (13.0, 99.0)]
    )
    assert cost_of([one], 10.0).standstill_s == pytest.approx(2.0)


def test_only_what_was_begun_after_the_kill_or_survived_it_is_kept() -> None:
    thrown_away = survivor(ticks_s=[10.1], steps_s=[(9.0, 9.9), (12.0, 13.0), (13.0, 14.0)])
    assert cost_of([thrown_away], 10.0).kept_after_s == pytest.approx(2.0)
    kept = survivor(ticks_s=[10.1], steps_s=[(9.9, 13.0), (13.0, 14.0)])
    assert cost_of([kept], 10.0).kept_after_s == 0.0


def test_ordinary_gap_is_that_between_undisturbed_steps_before_the_first_kill() -> None:
    ticks_s = [step + tenth / 10 for step in range(5) for tenth in range(8)]  # 0.3 s without one around each end
    one = survivor(ticks_s=[*ticks_s, 9.0], steps_s=[(step, step + 0.9) for step in range(5)])
    other = survivor(2, ticks_s=[at_s + 0.05 for at_s in ticks_s], steps_s=[])
    lives = {"0-1": one, "2-1": other, "1-1": Life(rank=1, killed_s=5.5)}
    assert undisturbed_s(lives) == pytest.approx(0.25)
    assert undisturbed_s({"0-1": one, "1-1": Life(rank=1, killed_s=0.5)}) is None


def test_job_that_does_not_go_on_has_no_figure() -> None:
    with pytest.raises(ValueError, match="did not go on"):
        cost_of([survivor(ticks_s=[11.0], steps_s=[(10.5, 11.0)])], 10.0)


def test_those_that_came_in_the_victims_place_count_only_where_everybody_restarts() -> None:
    back = Life(rank=1, ticks_s=[10.5], steps_s=[(10.0, 11.0), (11.0, 12.0)])
    lives = {"1-7": VICTIM, "1-8": back, "0-6": survivor(ticks_s=[11.0], steps_s=[])}
    assert back in survivors(lives, 10.0, of_its_rank=True)
    assert [life.rank for life in survivors(lives, 10.0, of_its_rank=False)] == [0]


def test_journals_are_read_while_they_are_written(tmp_path: Path) -> None:
    def write(name: str, *lines: dict[str, object]) -> None:
        with (tmp_path / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    lives = Lives(tmp_path)
    write("1-7.jsonl", {"t": 9.0, "event": "attempt"}, {"t": 10.0, "event": "kill"})
    assert kills(lives.look()) == [10.0]
    write("0-6.jsonl", {"t": 11.0, "event": "attempt"}, {"t": 11.5, "event": "tick"}, {"t": 12.0, "event": "step"})
    lives.look()
    write("0-6.jsonl", {"t": 12.0, "event": "attempt"}, {"t": 13.0, "event": "step"})
    assert costs(lives.look(), of_its_rank=False) == [Cost(standstill_s=1.5, kept_after_s=1.0)]
