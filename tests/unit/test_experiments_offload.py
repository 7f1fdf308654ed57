"""The offload experiment's own decisions."""

from __future__ import annotations

import pytest

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
