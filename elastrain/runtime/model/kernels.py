"""Set-up of torch in a worker: digests of its kernels, warm-up, and a late import of its compiler.

`kernel_digests` runs a few fixed computations: processes with different digests do not compute the same bits. The name
of the processor alone does not show that, because libraries choose kernels by environment variables, too. No random
number is drawn and all inputs are exact, so only kernels can differ. On the CPU, inputs are too small for several
threads to share. Accelerators compute larger ones, too, which reach tensor cores and sums that are split.

`warm_up` does the slow first calls before other members wait. torch.optim imports torch's compiler at the first call of
an optimizer, although most scripts need no compiler. That costs 1.2 s (nearly half of a worker's start) and 70 MB, and
`import_compiler_late` avoids it.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from elastrain.snapshot.digest import combine, digest

Kernel = Callable[..., Tensor]
_PERIOD = 2039
"""Number of different inputs of the fixed computations."""


class Fixed(NamedTuple):
    """A fixed computation: a kernel, and the shapes and dtype of its inputs."""

    run: Kernel
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32


def kernel_digests(device: torch.device, fixed: Mapping[str, Fixed] | None = None) -> dict[str, str]:
    """Return, by name of the kernel, the digest of its result and gradients. Waits for the device.

    Takes some 15 ms on a CPU. Kernels run in deterministic forms on an accelerator, whatever the script has set.

    Args:
        device: The device that computes.
        fixed: The computations. None: those that members of a job on this device compare.
    """
    if fixed is None:
        fixed = KERNELS if device.type == "cpu" else {**KERNELS, **LARGER}
    with torch.inference_mode(False), torch.enable_grad(), _without_autocast(device), _deterministic(device):
        return {name: _digest(each, device) for name, each in fixed.items()}


def _digest(fixed: Fixed, device: torch.device) -> str:
    inputs = [_numbers(shape, device, fixed.dtype).requires_grad_() for shape in fixed.shapes]
    try:
        result = fixed.run(*inputs)
        (result * _numbers(tuple(result.shape), device, fixed.dtype)).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        # Not every PrivateUse1 device has all kernels. On the CPU, attention in bfloat16 fails if the processor has AMX
        # and ATEN_CPU_CAPABILITY leaves AVX-512 out.
        if device.type == "cpu" or isinstance(error, NotImplementedError):
            return "missing"
        raise
    return f"{combine(digest(t.contiguous()) for t in (result, *(i.grad for i in inputs)) if t is not None):016x}"


def _numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return varied numbers in (-0.5, 0.5) with the same bits on every machine: integers and one rounded division."""
    # They repeat, so that the device needs no memory for their positions: a job's limit counts from its start.
    numel = torch.Size(shape).numel()
    positions = torch.arange(min(numel, _PERIOD), dtype=torch.int64, device=device)
    numbers = ((positions * 7919 + 31) % _PERIOD).float().sub(1019).div(_PERIOD).to(dtype)
    return numbers.repeat(-(-numel // len(numbers)))[:numel].view(shape)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast. Devices that cannot autocast at all refuse torch's own context."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Choose deterministic kernels on an accelerator: with others, a digest would differ from one run to the next."""
    before = torch.get_deterministic_debug_mode()
    if device.type == "cpu":
        yield
        return
    try:
        # Unlike `torch.use_deterministic_algorithms`, this does not import torch's compiler.
        torch.set_deterministic_debug_mode("warn")
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _looked_up(lookups: int) -> Kernel:
    """Return an embedding that looks up each row several times, so that its backward adds to rows."""
    return lambda rows: functional.embedding(torch.arange(lookups, device=rows.device) * 5 % len(rows), rows)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


KERNELS = {
    "convolution": Fixed(lambda x, w: functional.conv2d(x, w, padding=1), ((2, 16, 14, 14), (32, 16, 3, 3))),
    "matrix product": Fixed(torch.matmul, ((48, 192), (192, 64))),
    "matrix-vector product": Fixed(torch.matmul, ((3, 500), (500, 1))),
    "attention": Fixed(functional.scaled_dot_product_attention, ((1, 2, 32, 16),) * 3),
    "indexing": Fixed(lambda rows: rows[torch.arange(256, device=rows.device) * 5 % 16], ((16, 32),)),
    "layer norm": Fixed(lambda x, w, b: functional.layer_norm(x, (96,), w, b), ((8, 96), (96,), (96,))),
    "softmax": Fixed(lambda x: x.mul(9.0).softmax(-1), ((8, 100),)),
    "tanh": Fixed(lambda x: x.mul(9.0).tanh(), ((8, 100),)),
    "GELU": Fixed(functional.gelu, ((8, 100),)),
    "embedding": Fixed(_looked_up(256), ((16, 32),)),
    "long matrix product": Fixed(torch.matmul, ((16, 2048), (2048, 16))),
    "bfloat16 matrix product": Fixed(torch.matmul, ((48, 192), (192, 64)), torch.bfloat16),
    "bfloat16 attention": Fixed(_attention, ((1, 2, 64, 64),) * 3, torch.bfloat16),
}
"""Computations that members compare on every device."""

LARGER = {
    "large matrix product": Fixed(torch.matmul, ((512, 512), (512, 512))),
    "large bfloat16 matrix product": Fixed(torch.matmul, ((512, 512), (512, 512)), torch.bfloat16),
    "large float16 matrix product": Fixed(torch.matmul, ((256, 256), (256, 256)), torch.float16),
    "split matrix product": Fixed(torch.matmul, ((64, 16384), (16384, 64))),
    "split bfloat16 matrix product": Fixed(torch.matmul, ((64, 16384), (16384, 64)), torch.bfloat16),
    "large attention": Fixed(_attention, ((1, 4, 256, 64),) * 3),
    "large bfloat16 attention": Fixed(_attention, ((1, 4, 256, 64),) * 3, torch.bfloat16),
    "large bfloat16 convolution": Fixed(
        lambda x, w: functional.conv2d(x, w, padding=1), ((4, 64, 28, 28), (64, 64, 3, 3)), torch.bfloat16
    ),
    "large embedding": Fixed(_looked_up(8192), ((512, 256),), torch.bfloat16),
    "large layer norm": Fixed(lambda x, w, b: functional.layer_norm(x, (512,), w, b), ((2048, 512), (512,), (512,))),
    "large sum": Fixed(torch.sum, ((1 << 20,),)),
    "large cross entropy": Fixed(
        lambda x: functional.cross_entropy(x, torch.arange(len(x), device=x.device)), ((64, 8192),)
    ),
}
"""Computations that members compare on accelerators only, where they take milliseconds.

They are large enough for tensor cores, for long sums that are split among multiprocessors, and for backwards in which
many threads add to one place."""


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
