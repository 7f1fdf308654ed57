"""A few fixed computations, digested: two processes whose digests differ do not compute the same bits.

The kind of processor is not enough to tell: libraries choose their kernels by it, and by variables of the environment.
Nothing here draws a random number, and inputs are made of exact operations, so that only the kernels can differ. They
are too small for several threads to share them: what has no fixed order then is a matter of the model (see
`elastrain.checks`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from elastrain.snapshot.digest import combine, digest

Kernel = Callable[..., Tensor]


def kernel_digests(device: torch.device) -> dict[str, str]:
    """Name of a kernel -> digest of its result and gradients. A few milliseconds."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        return {name: f"{_digest(run, shapes, device):016x}" for name, (run, shapes) in _KERNELS.items()}


def _digest(run: Kernel, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> int:
    inputs = [_numbers(shape, device).requires_grad_() for shape in shapes]
    result = run(*inputs)
    (result * _numbers(tuple(result.shape), device)).sum().backward()  # type: ignore[no-untyped-call]
    return combine(digest(t.contiguous()) for t in (result, *(i.grad for i in inputs)) if t is not None)


def _numbers(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Different numbers in (-0.5, 0.5), the same everywhere: integers and one rounded division."""
    positions = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device)
    return ((positions * 7919 + 31) % 2039).float().sub(1019).div(2039).view(shape)


_KERNELS: dict[str, tuple[Kernel, tuple[tuple[int, ...], ...]]] = {
    "convolution": (lambda x, w: functional.conv2d(x, w, padding=1), ((2, 16, 14, 14), (32, 16, 3, 3))),
    "matrix product": (lambda a, b: a @ b, ((48, 192), (192, 64))),
    "matrix-vector product": (lambda a, b: a @ b, ((3, 500), (500, 1))),
    "attention": (functional.scaled_dot_product_attention, ((1, 2, 32, 16),) * 3),
    "indexing": (lambda rows: rows[torch.arange(256, device=rows.device) * 5 % 16], ((16, 32),)),
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (96,), w, b), ((8, 96), (96,), (96,))),
    "softmax": (lambda x: x.mul(9.0).softmax(-1), ((8, 100),)),
    "tanh": (lambda x: x.mul(9.0).tanh(), ((8, 100),)),
    "GELU": (functional.gelu, ((8, 100),)),
}
