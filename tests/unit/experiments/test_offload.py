"""The offload experiment's own decisions."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from experiments.offload.device import spill_directory
from experiments.offload.gain import largest_that

BATCHES = (1, 2, 4, 8)


@pytest.mark.parametrize("room", [0, *BATCHES])
def test_largest_batch_is_the_last_that_fits(room: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= room

    assert largest_that(fits, BATCHES) == (room or None)
    assert len(set(tried)) == len(tried) < len(BATCHES)


def test_a_directory_that_nothing_can_be_spilled_to_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser(prog="tried")
    assert spill_directory(parser, str(tmp_path)) == str(tmp_path)
    with pytest.raises(SystemExit) as ended:
        spill_directory(parser, str(tmp_path / "missing"))
    assert ended.value.code == 2
    missing = tmp_path / "missing"
    assert capsys.readouterr().err.endswith(
        f"--dir: {missing} is not a directory: create it on an SSD, or name another one\n"
    )
