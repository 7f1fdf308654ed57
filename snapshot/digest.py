"""Digests of tensors: position-dependent integer sums made of tensor operations, equal on every device.

The elements' bits are read as integers x[i] and summed as `sum(x[i] * w[i]) mod 2**64` with odd pseudo-random weights:
one changed element always changes the digest, any other difference passes with a probability of about 2**-32 at the
worst (multilinear hashing, Lemire and Kaser, 2014). This finds corruption and divergence; it is no defence against
somebody who chooses the data. No file I/O, and nothing that copies a tensor to the host.

A `digest` is for people and for files: it means the same everywhere and for ever. A `checksum` is for members that
compare with each other what they have just made.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from elastrain.base.arithmetic import FACTORS, GOLDEN, MASK, scramble

ROW = 16384
"""Elements that share a multiplier. Part of the definition: changing it changes every digest."""
_ROWS_AT_ONCE = {"cuda": 64}
"""Rows per pass, elsewhere 8: scratch of at most 8 MiB."""
_AT_ONCE_BYTES = 4 << 20
"""Of a checksum in host memory: a fraction of a millisecond."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def digest(tensor: Tensor) -> int:
    """Digest of a tensor's bits, in 0..2**64-1.

    Any dtype and device; contiguous, and taken as 1-D. Waits for the device. Raises ValueError if not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"digest needs a contiguous tensor; got strides {tensor.stride()} for {tuple(tensor.shape)}")
    flat = tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])
    return scramble(_weighted_sum(flat) + scramble(flat.numel() * flat.element_size()))


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's bits, in 0..2**64-1: XXH3 of its bytes in host memory, eight times as fast as `digest`.

    For what is compared within one job: on any other device it is the `digest`, so it agrees only between tensors on
    devices of one kind, and nothing that is kept may hold it. As `digest` otherwise.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"checksum needs a contiguous tensor; got strides {tensor.stride()} for {tuple(tensor.shape)}")
    if tensor.device.type != "cpu":
        return digest(tensor)
    data = tensor.detach().view(-1).view(torch.uint8).numpy().data
    if len(data) <= _AT_ONCE_BYTES:
        return xxhash.xxh3_64_intdigest(data)
    hasher = xxhash.xxh3_64()
    # Other threads of this process, the training loop among them, get the interpreter in between.
    for start in range(0, len(data), _AT_ONCE_BYTES):
        hasher.update(data[start : start + _AT_ONCE_BYTES])
    return hasher.intdigest()


def combine(digests: Iterable[int]) -> int:
    """One digest of several, in their order."""
    total = GOLDEN
    for value in digests:
        total = scramble((total ^ value) + GOLDEN)
    return total


def _weighted_sum(flat: Tensor) -> int:
    """The sum over all rows, mod 2**64. `flat`: 1-D integers."""
    weights = _weights(flat.device)
    full_rows, rest = divmod(flat.numel(), ROW)
    left = flat[full_rows * ROW :].to(torch.int64).mul_(weights[:rest]).sum()
    total = left * _multipliers(flat.device, full_rows)[-1]
    if full_rows:
        sums = _row_sums(flat[: full_rows * ROW].view(full_rows, ROW), weights)
        total += sums.mul_(_multipliers(flat.device, full_rows)[:-1]).sum()
    return int(total.item()) & MASK


def _row_sums(table: Tensor, weights: Tensor) -> Tensor:
    """int64 `(rows,)` of `(rows, ROW)` integers."""
    if table.device.type == "cpu":
        # Widened, multiplied and added up in one pass without scratch: two thirds of the time of three calls of torch.
        return torch.from_numpy(np.einsum("ij,j->i", table.numpy(), weights.numpy()))
    rows_at_once = _ROWS_AT_ONCE.get(table.device.type, 8)
    sums = torch.empty(table.shape[0], dtype=torch.int64, device=table.device)
    scratch = torch.empty((min(rows_at_once, table.shape[0]), ROW), dtype=torch.int64, device=table.device)
    for start in range(0, table.shape[0], rows_at_once):
        rows = table[start : start + rows_at_once]
        products = scratch[: rows.shape[0]].copy_(rows).mul_(weights)
        torch.sum(products, dim=1, out=sums[start : start + rows.shape[0]])
    return sums


def _multipliers(device: torch.device, full_rows: int) -> Tensor:
    """One per full row, and one for the rest."""
    size = 1 << full_rows.bit_length()
    return _cached_multipliers(device, size)[: full_rows + 1]


@cache
def _cached_multipliers(device: torch.device, size: int) -> Tensor:
    return _odd_numbers(size, seed=2, device=device)


@cache
def _weights(device: torch.device) -> Tensor:
    return _odd_numbers(ROW, seed=1, device=device)


def _odd_numbers(count: int, *, seed: int, device: torch.device) -> Tensor:
    """`count` pseudo-random odd 64-bit numbers: `base.splitmix` of the position."""
    z = torch.arange(count, dtype=torch.int64, device=device) + (seed << 40)
    z = z * _signed(GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(FACTORS[0])
    z = (z ^ _shift(z, 27)) * _signed(FACTORS[1])
    return (z ^ _shift(z, 31)) | 1


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's own carries the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
