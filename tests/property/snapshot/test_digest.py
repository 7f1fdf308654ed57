"""No changed bit and no swap of elements leaves a digest as it was."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastrain.snapshot.digest import ROW, digest

torch.set_num_threads(1)

NUMELS = st.integers(1, 300) | st.integers(ROW - 3, ROW + 3) | st.integers(2 * ROW, 3 * ROW)


def _bits(numel: int, seed: int, *, few: bool) -> torch.Tensor:
    """Random bits, or floats out of a few powers of two, whose differences have many trailing zeros."""
    generator = torch.Generator().manual_seed(seed)
    if few:
        return torch.pow(2.0, torch.randint(-3, 3, (numel,), generator=generator)).view(torch.int32)
    return torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int32)


@settings(max_examples=3 * settings().max_examples, deadline=None, derandomize=True)
@given(numel=NUMELS, seed=st.integers(0, 1000), place=st.integers(0, 10**6), bit=st.integers(0, 31))
def test_every_flipped_bit_changes_the_digest(numel: int, seed: int, place: int, bit: int) -> None:
    values = _bits(numel, seed, few=False)
    before = digest(values.view(torch.float32))
    values[place % numel] ^= -(2**31) if bit == 31 else 1 << bit
    assert digest(values.view(torch.float32)) != before


@settings(max_examples=3 * settings().max_examples, deadline=None, derandomize=True)
@given(numel=NUMELS, seed=st.integers(0, 1000), a=st.integers(0, 10**6), b=st.integers(0, 10**6))
def test_every_swap_of_different_elements_changes_the_digest(numel: int, seed: int, a: int, b: int) -> None:
    values = _bits(numel, seed, few=True)
    i, j = a % numel, b % numel
    assume(values[i] != values[j])
    before = digest(values)
    values[i], values[j] = values[j].clone(), values[i].clone()
    assert digest(values) != before


@settings(max_examples=settings().max_examples, deadline=None, derandomize=True)
@given(numel=NUMELS, seed=st.integers(0, 1000), shift=st.integers(1, 2 * ROW))
def test_every_shift_changes_the_digest(numel: int, seed: int, shift: int) -> None:
    values = _bits(numel, seed, few=False)
    shifted = values.roll(shift)
    assume(not torch.equal(values, shifted))
    assert digest(shifted) != digest(values)
