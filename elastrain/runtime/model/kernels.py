"""A few fixed computations, digested: two processes whose digests differ do not compute the same bits.

The kind of processor is not enough to tell: libraries choose their kernels by it, and by variables of the environment.
Nothing here draws a random number, and inputs are made of exact operations, so that only the kernels can differ. They
are too small for several threads to share them: what has no fixed order then is a matter of the model (see
`elastrain.integrity.checks`).

What takes time only once (torch's matrix products, its autograd engine, the heap) is done before others wait.

Optimizers that work without torch's compiler, which is imported when something is compiled and not before.

torch keeps methods of its optimizers out of what is compiled, and imports the compiler for that when the first of them
is called, whether anybody compiles or not: 1.2 s of processor time, nearly half of a worker's start, and 70 MB.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

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


# By what they do, since torch gives these wrappers no public name. Another torch's may do more: such a one stays.
_KEEPS_OUT = frozenset(("torch", "torch._dynamo", "_dynamo", "getattr", "__dynamo_disable", "disable"))
_SETS_GRAD = frozenset(("torch", "torch._dynamo", "_dynamo", "graph_break", "cast", "Optimizer", "defaults"))
_SETS_GRAD |= {"is_grad_enabled", "set_grad_enabled"}


def import_compiler_late() -> None:
    """From now on methods of optimizers are called as they are, as long as the compiler is not there."""
    unwrap(Optimizer, [each for each in vars(torch.optim).values() if isinstance(each, type)])


def unwrap(base: type, classes: Iterable[type]) -> None:
    """Of `base` the methods that are kept out of what is compiled, of `classes` each `step`, where they are known."""
    for name, method in list(vars(base).items()):
        if _does_only(method, _KEEPS_OUT):
            setattr(base, name, _late(method, method.__wrapped__))
    for cls in classes:
        step: Any = vars(cls).get("step")
        if issubclass(cls, base) and _does_only(step, _SETS_GRAD):
            setattr(cls, "step", _late(step, functools.partial(_stepped, step.__wrapped__)))  # noqa: B010  mypy wants no assignment


def _does_only(method: Any, names: frozenset[str]) -> bool:
    """Whether it is a wrapper that imports the compiler, and uses nothing besides that is not among these names."""
    code: Any = getattr(method, "__code__", None)
    is_wrapper = callable(getattr(method, "__wrapped__", None)) and "torch._dynamo" in getattr(code, "co_names", ())
    return is_wrapper and names.issuperset(code.co_names)


def _late(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return instead


def _stepped(step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
        return step(optimizer, *args, **kwargs)
