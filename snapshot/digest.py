"""Digests of tensors: position-dependent integer sums, computed by tensor operations, and equal on every device.

The bits of the elements are read as integers x[i] and summed as `sum(x[i] * w[i]) mod 2**64` with odd pseudo-random
weights. One changed element always changes the digest. Any other difference stays undetected with a probability of at
most about 2**-32 (multilinear hashing, Lemire and Kaser, 2014). Digests find corruption and divergence. They do not
protect against an attacker who chooses the data. No file I/O, and no copy of a tensor to the host.

A `digest` is stable: it may be stored in files and shown to users. A `checksum` is only for members that compare values
they have just computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import torch
import xxhash
from torch import Tensor

from elastrain.base.arithmetic import FACTORS, GOLDEN, MASK, scramble
from elastrain.device import DeviceEvent, device_of

ROW = 16384
"""Elements that share a multiplier. It belongs to the definition: changing it changes every digest."""
_ROWS_AT_ONCE = {"cuda": 64}
"""Rows per pass by device type; 8 for a type not listed here. Scratch memory is at most 8 MiB."""
_AT_ONCE_BYTES = 4 << 20
"""Bytes that `checksum` hashes in one call on the host, which takes a fraction of a millisecond."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def digest(tensor: Tensor) -> int:
    """Return the digest of a tensor's bits, in 0..2**64-1. Waits for the device.

    Args:
        tensor: A contiguous tensor of any dtype, shape and device. Its shape does not matter.

    Raises:
        ValueError: If the tensor is not contiguous.
    """
    total, size_bytes = _submitted(tensor)
    return _finished(int(total.item()), size_bytes)


def digest_later(tensor: Tensor) -> Callable[[], int]:
    """Submit the digest of a tensor, and return a function that waits for it. On the host it is computed at once.

    Raises ValueError if the tensor is not contiguous.
    """
    if tensor.device.type == "cpu":
        found = digest(tensor)
        return lambda: found
    total, size_bytes = _submitted(tensor)
    return lambda: _finished(int(total.item()), size_bytes)


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return the digest of each tensor, as `digest` does. Waits once, if all tensors lie on one device."""
    submitted = [_submitted(tensor) for tensor in tensors]
    totals = [total for total, _ in submitted]
    if len({total.device for total in totals}) == 1:
        totals = list(torch.stack(totals).cpu())
    return [_finished(int(total), size) for total, (_, size) in zip(totals, submitted, strict=True)]


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bits, in 0..2**64-1. On the host it is eight times as fast as `digest`.

    In host memory it is the XXH3 of the bytes; on any other device it is the `digest`. Checksums therefore agree only
    between devices of one kind. Use them within one job, and do not store them.

    Args:
        tensor: A contiguous tensor of any dtype, shape and device. Its shape does not matter.

    Raises:
        ValueError: If the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"checksum needs a contiguous tensor; got strides {tensor.stride()} for {tuple(tensor.shape)}")
    if tensor.device.type != "cpu":
        return digest(tensor)
    data = tensor.detach().view(-1).view(torch.uint8).numpy().data
    if len(data) <= _AT_ONCE_BYTES:
        return xxhash.xxh3_64_intdigest(data)
    hasher = xxhash.xxh3_64()
    # Between two calls, other threads (such as the training loop) get the interpreter lock.
    for start in range(0, len(data), _AT_ONCE_BYTES):
        hasher.update(data[start : start + _AT_ONCE_BYTES])
    return hasher.intdigest()


def combine(digests: Iterable[int]) -> int:
    """Return one digest of several digests. Their order matters."""
    total = GOLDEN
    for value in digests:
        total = scramble((total ^ value) + GOLDEN)
    return total


def _submitted(tensor: Tensor) -> tuple[Tensor, int]:
    if not tensor.is_contiguous():
        raise ValueError(f"digest needs a contiguous tensor; got strides {tensor.stride()} for {tuple(tensor.shape)}")
    flat = tensor.detach().view(-1).view(_INTEGERS[tensor.element_size()])
    return _weighted_sum(flat), flat.nbytes


def _finished(total: int, size_bytes: int) -> int:
    return scramble((total & MASK) + scramble(size_bytes))


def _weighted_sum(flat: Tensor) -> Tensor:
    """Return the weighted sum over all rows, mod 2**64. `flat` holds 1-D integers."""
    weights = _multipliers(flat.device, ROW, seed=1)
    full_rows, rest = divmod(flat.numel(), ROW)
    left = flat[full_rows * ROW :].to(torch.int64).mul_(weights[:rest]).sum()
    multipliers = _multipliers(flat.device, 1 << full_rows.bit_length(), seed=2)
    total = left * multipliers[full_rows]
    if full_rows:
        sums = _row_sums(flat[: full_rows * ROW].view(full_rows, ROW), weights)
        total += sums.mul_(multipliers[:full_rows]).sum()
    return total


def _row_sums(table: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row as int64 `(rows,)`. `table` holds integers of shape `(rows, ROW)`."""
    if table.device.type == "cpu":
        # One pass without scratch memory. Separate torch calls to widen, multiply and add take 1.5 times as long.
        return torch.from_numpy(np.einsum("ij,j->i", table.numpy(), weights.numpy()))
    rows_at_once = _ROWS_AT_ONCE.get(table.device.type, 8)
    sums = torch.empty(table.shape[0], dtype=torch.int64, device=table.device)
    scratch = torch.empty((min(rows_at_once, table.shape[0]), ROW), dtype=torch.int64, device=table.device)
    for start in range(0, table.shape[0], rows_at_once):
        rows = table[start : start + rows_at_once]
        products = scratch[: rows.shape[0]].copy_(rows).mul_(weights)
        torch.sum(products, dim=1, out=sums[start : start + rows.shape[0]])
    return sums


def _multipliers(device: torch.device, count: int, *, seed: int) -> Tensor:
    """Return `count` numbers that the current stream may read, whichever stream has made them."""
    numbers, made = _odd_numbers(count, seed=seed, device=device)
    made.wait()
    return numbers


@cache
def _odd_numbers(count: int, *, seed: int, device: torch.device) -> tuple[Tensor, DeviceEvent]:
    """Return `count` pseudo-random odd 64-bit numbers: the SplitMix64 hash of each position. Returns an event, too."""
    z = torch.arange(count, dtype=torch.int64, device=device) + (seed << 40)
    z = z * _signed(GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(FACTORS[0])
    z = (z ^ _shift(z, 27)) * _signed(FACTORS[1])
    return (z ^ _shift(z, 31)) | 1, device_of(device).record()


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift logically to the right. The shift of torch would copy the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
