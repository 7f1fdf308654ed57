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
