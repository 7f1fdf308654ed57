"""What takes time only once (torch's matrix products, its autograd engine, the heap) is done before others wait."""

from __future__ import annotations

import torch


def compute_device(model: torch.nn.Module) -> torch.device:
    return next(iter(model.parameters()), torch.empty(0)).device


_THRESHOLD_BYTES = 30 << 20
_HEAP_PIECE_BYTES, _HEAP_PIECES = 14 << 20, 4


def warm_up(model: torch.nn.Module) -> None:
    """Let torch set up its matrix products, its autograd engine and its heap now; draws no random numbers."""
    device = compute_device(model)
    if device.type == "cpu":
        _warm_heap(heap_piece_bytes(model))
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    hidden = torch.nn.functional.gelu(torch.ones(64, 64, device=device) @ weight)
    torch.nn.functional.layer_norm(hidden, (64,)).sum().backward()  # type: ignore[no-untyped-call]


def heap_piece_bytes(model: torch.nn.Module) -> int:
    """How large each piece of the heap is made: a micro-batch of a small model touches little of it."""
    return min(_HEAP_PIECE_BYTES, 4 * sum(each.nbytes for each in model.parameters()))


def _warm_heap(piece_bytes: int) -> None:
    """Take from the kernel now what the first micro-batch would take page by page, while others wait for this member.

    glibc keeps freed memory below twice the largest mapped piece that it has seen freed (at most 32 MiB; see
    `M_MMAP_THRESHOLD` in mallopt(3)): after the first line, what the second one touches stays in the heap.
    """
    torch.empty(_THRESHOLD_BYTES, dtype=torch.uint8)
    [torch.zeros(piece_bytes, dtype=torch.uint8) for _ in range(_HEAP_PIECES)]
