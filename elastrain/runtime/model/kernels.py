"""Set-up of torch in a worker: digests of its kernels, warm-up, and a late import of its compiler.

`kernel_digests` runs a few fixed computations: processes with different digests do not compute the same bits. The CPU
model alone does not show that, because libraries choose kernels by environment variables, too. No random number is
drawn and all inputs are exact, so only kernels can differ. Inputs are too small for several threads to share.

`warm_up` does the slow first calls before other members wait. torch.optim imports torch's compiler at the first call of
an optimizer, although most scripts need no compiler. That costs 1.2 s (nearly half of a worker's start) and 70 MB, and
`import_compiler_late` avoids it.
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
    """Return, by name of the kernel, the digest of its result and gradients. Takes a few milliseconds."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        return {name: f"{_digest(run, shapes, device):016x}" for name, (run, shapes) in _KERNELS.items()}


def _digest(run: Kernel, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> int:
    inputs = [_numbers(shape, device).requires_grad_() for shape in shapes]
    result = run(*inputs)
    (result * _numbers(tuple(result.shape), device)).sum().backward()  # type: ignore[no-untyped-call]
    return combine(digest(t.contiguous()) for t in (result, *(i.grad for i in inputs)) if t is not None)


def _numbers(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return varied numbers in (-0.5, 0.5) with the same bits on every machine: integers and one rounded division."""
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
    """Return the device of the model's first parameter, or the default device if it has none."""
    return next(iter(model.parameters()), torch.empty(0)).device


_THRESHOLD_BYTES = 30 << 20
_HEAP_PIECE_BYTES, _HEAP_PIECES = 14 << 20, 4


def warm_up(model: torch.nn.Module) -> None:
    """Make torch set up its matrix products, its autograd engine and its heap now. Draws no random numbers."""
    device = compute_device(model)
    if device.type == "cpu":
        _warm_heap(heap_piece_bytes(model))
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    hidden = torch.nn.functional.gelu(torch.ones(64, 64, device=device) @ weight)
    torch.nn.functional.layer_norm(hidden, (64,)).sum().backward()  # type: ignore[no-untyped-call]


def heap_piece_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of each piece that warms the heap; small for small models, whose micro-batches need little."""
    return min(_HEAP_PIECE_BYTES, 4 * sum(each.nbytes for each in model.parameters()))


def _warm_heap(piece_bytes: int) -> None:
    """Get heap memory from the kernel now. Else the first micro-batch gets it page by page while other members wait.

    glibc keeps up to twice the size of the largest mapped piece that was freed (at most 32 MiB; see `M_MMAP_THRESHOLD`
    in mallopt(3)). The first line frees such a piece, so the memory that the second line touches stays in the heap.
    """
    torch.empty(_THRESHOLD_BYTES, dtype=torch.uint8)
    [torch.zeros(piece_bytes, dtype=torch.uint8) for _ in range(_HEAP_PIECES)]


# Wrappers are recognised by the names that they use, since torch gives them no public name. A wrapper of another torch
# version that uses more names is left as it is.
_KEEPS_OUT = frozenset(("torch", "torch._dynamo", "_dynamo", "getattr", "__dynamo_disable", "disable"))
_SETS_GRAD = frozenset(("torch", "torch._dynamo", "_dynamo", "graph_break", "cast", "Optimizer", "defaults"))
_SETS_GRAD |= {"is_grad_enabled", "set_grad_enabled"}


def import_compiler_late() -> None:
    """Make optimizers call their plain methods as long as torch's compiler has not been imported."""
    unwrap(Optimizer, [each for each in vars(torch.optim).values() if isinstance(each, type)])


def unwrap(base: type, classes: Iterable[type]) -> None:
    """Replace known compiler wrappers on the methods of `base` and on `step` of `classes`."""
    for name, method in list(vars(base).items()):
        if _does_only(method, _KEEPS_OUT):
            setattr(base, name, _late(method, method.__wrapped__))
    for cls in classes:
        step: Any = vars(cls).get("step")
        if issubclass(cls, base) and _does_only(step, _SETS_GRAD):
            setattr(cls, "step", _late(step, functools.partial(_stepped, step.__wrapped__)))  # noqa: B010  mypy wants no assignment


def _does_only(method: Any, names: frozenset[str]) -> bool:
    """Return True if `method` is a wrapper that imports the compiler and uses no names except `names`."""
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
