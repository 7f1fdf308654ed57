"""What the lifetimes experiment does besides measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.lifetimes import figures
from experiments.lifetimes.plot import draw, newest_curve

CURVE = {
    "rate_bytes_per_s": [0.25e9, 1e9, 4e9],
    "ours 0.5": [0.5, 0.9, 1.0],
    "zero": [0.2, 0.4, 0.7],
    "plain": [1, 1, 1],
}


def test_without_a_device_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^--device cuda: torch finds no CUDA device on this machine; leave"):
        figures.main(["--device", "cuda"])


def test_the_newest_curve_is_drawn(tmp_path: Path) -> None:
    assert newest_curve(tmp_path) is None
    kept = [{"figures": {"curve": {}}}, {"figures": {"curve": CURVE}}, {"figures": {"bits_equal": 1}}]
    (tmp_path / "quick.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in kept))
    found = newest_curve(tmp_path)
    assert found == CURVE
    assert draw(CURVE, tmp_path / "curve.png").stat().st_size > 1000


def test_a_step_is_held_to_the_plan_that_it_ran_under_and_not_to_a_later_one() -> None:
    """A plan that is made anew when the last step ends predicts nothing of those that were measured."""
    plain = {"wall_s": [1.0, 1.0], "thread_s": [1.0, 1.0], "digest": "a"}
    ours = {
        **plain,
        "wall_s": [2.0, 2.0],
        "peak_bytes": 1,
        "limit_bytes": 2,
        "predicted_s": [2.0, 2.0],
        "predicted_written_bytes": [100, 100],
        "plan": {"predicted_s": 1.0, "predicted_written_bytes": 50},
        "written_bytes": 100.0,
    }
    ways = {"plain": plain, "ours 0.5": ours, "ours 0.25": ours, "zero": ours, "demand": ours}
    found = figures.summary({"gpt": ways}, {})
    assert (found["model_error"], found["written_error"]) == (0.0, 0.0)


@pytest.mark.parametrize(("zero_s", "ours_s", "share"), [(3.0, 1.5, 2.0 / 1.47), (1.25, 1.0, 1.0), (1.25, 1.25, 0.8)])
def test_what_nothing_could_reach_is_not_asked_for(zero_s: float, ours_s: float, share: float) -> None:
    """Plain training is the fastest that there is: over a policy with 0.8 of its speed nothing gains more than 1.25."""
    found = {name: {"wall_s": [s, s]} for name, s in (("plain", 1.0), ("zero", zero_s), ("ours 0.5", ours_s))}
    assert figures.share_of_possible(found, "ours 0.5", "zero", 1.47) == pytest.approx(share)
