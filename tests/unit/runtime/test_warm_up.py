"""What a member sets up before others wait for it."""

from __future__ import annotations

from torch import nn

from elastrain.runtime.model.kernels import heap_piece_bytes


def test_the_heap_is_made_in_proportion_to_a_small_model_and_has_a_bound_for_a_large_one() -> None:
    assert heap_piece_bytes(nn.Linear(9, 10)) == 4 * 100 * 4
    assert heap_piece_bytes(nn.Linear(4096, 1024, device="meta")) == 14 << 20
    assert heap_piece_bytes(nn.Identity()) == 0
