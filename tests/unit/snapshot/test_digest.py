"""Digests: fixed values, every dtype, every size around the rows."""

from __future__ import annotations

import pytest
import torch

from elastrain.snapshot.digest import ROW, checksum, combine, digest

torch.set_num_threads(1)


def test_digests_are_fixed_for_ever() -> None:
    assert digest(torch.arange(3 * ROW + 5, dtype=torch.int32)) == 1485074551819677637
    assert digest(torch.arange(7, dtype=torch.float64)) == 5229456121961757920
    assert combine([1, 2]) == 9550467469912592448


def _slow_digest(values: list[int], nbytes: int) -> int:
    """The definition in whole numbers, `values` being the elements as signed integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def odd(position: int, seed: int) -> int:
        return mix((position + (seed << 40)) * golden & mask) | 1

    total = sum(x * odd(i % ROW, 1) * odd(i // ROW, 2) for i, x in enumerate(values))
    return mix((total + mix(nbytes)) & mask)


@pytest.mark.parametrize("numel", [0, 1, 2, ROW - 1, ROW, ROW + 1, 5 * ROW + 3])
def test_the_sum_is_the_one_defined(numel: int) -> None:
    values = torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int32, generator=torch.Generator().manual_seed(numel))
    assert digest(values) == _slow_digest(values.tolist(), 4 * numel)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_every_dtype_is_digested_by_its_bits(dtype: torch.dtype) -> None:
    values = torch.arange(ROW + 7).to(dtype)
    changed = values.clone()
    changed[0] = 1
    assert digest(values) == digest(values.clone()) != digest(changed)


def test_signs_of_zero_and_kinds_of_nan_differ() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert digest(zeros[:1]) != digest(zeros[1:])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nans[:1]) != digest(nans[1:])


def test_lengths_of_zeros_differ() -> None:
    assert len({digest(torch.zeros(n)) for n in (0, 1, 2, ROW, ROW + 1, 2 * ROW)}) == 6


def test_a_view_in_the_middle_of_a_buffer_is_digested_alone() -> None:
    buffer = torch.randn(3 * ROW)
    view = buffer[5 : 2 * ROW]
    assert digest(view) == digest(view.clone())
    assert digest(buffer.view(3, ROW)) == digest(buffer)


def test_gradients_are_not_followed() -> None:
    assert digest(torch.nn.Parameter(torch.ones(3))) == digest(torch.ones(3))


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        digest(torch.zeros(4, 4)[:, 0])


def test_combining_depends_on_order_and_number() -> None:
    combined = [combine(digests) for digests in ([], [0], [0, 0], [1, 2], [2, 1], [1], [2])]
    assert len(set(combined)) == len(combined)
    assert all(0 <= value < 2**64 for value in combined)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_checksum_is_of_the_bits(dtype: torch.dtype) -> None:
    values = torch.arange(ROW + 7).to(dtype)
    changed = values.clone()
    changed[0] = 1
    assert checksum(values) == checksum(values.clone()) != checksum(changed)
    assert checksum(values[:0]) != checksum(values[:1]) == checksum(values[:1].view(1, 1))


def test_a_checksum_sees_each_part_of_much_and_its_order() -> None:
    numel = 3 * (1 << 20) + 5  # several of the pieces in which it is taken
    values = torch.arange(numel, dtype=torch.int32)
    found = {checksum(values)}
    for place in (0, 1 << 20, (2 << 20) - 1, numel - 1):
        values[place] ^= 1 << 30
        found.add(checksum(values))
        values[place] ^= 1 << 30
    found.add(checksum(torch.cat([values[1 << 20 : 2 << 20], values[: 1 << 20], values[2 << 20 :]])))
    assert len(found) == 6
    assert checksum(values) in found


def test_a_checksum_of_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        checksum(torch.zeros(4, 4).t())
