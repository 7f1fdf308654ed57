"""Random programs under autograd: with offload they give the bits that they give without, or raise where torch raises.

PyTorch itself is the oracle. Views, changes in place, results that nobody uses, graphs that are walked twice, second
derivatives and recomputed regions come in any order; drives are fast, slow, failing or lying.
"""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.offload import ActivationOffload, OffloadConfig, OffloadError
from elastrain.offload.drives.port import IoEngine
from tests.support.faulty_engines import EngineFaults, FaultyEngine, ThrottledEngine
from tests.support.memory_engine import MemoryEngine

SIDE = 16
TENSOR_BYTES = 4 * SIDE * SIDE
Bits = tuple[bytes, ...]


@pytest.fixture(autouse=True, scope="module")
def _one_thread_and_quick_collections() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # each example collects: only what it made
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


class Twice(torch.autograd.Function):
    """Saves an input, an output and a strided part that is neither."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(x, y, x[::2].t())
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y, part = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * x.cos() + y * part.sum()


@dataclass
class Memory:
    """What a program works on: square matrices, among them leaves, a parameter and a constant."""

    leaves: list[Tensor]
    live: list[Tensor] = field(default_factory=list)

    def at(self, number: int) -> Tensor:
        return self.live[number % len(self.live)]


def fresh() -> Memory:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(SIDE, SIDE, generator=generator) * 0.3 for _ in range(4)]
    weight, constant = nn.Parameter(made[2]), made[3]
    leaves = [made[0].requires_grad_(), made[1].requires_grad_(), weight]
    return Memory(leaves=leaves, live=[*leaves, constant])


def gates(a: Tensor, b: Tensor) -> Tensor:
    """As torch's recurrent cells do: parts of one storage with a version each, changed one after the other."""
    first, second = (a @ b).unsafe_chunk(2, dim=1)
    opened, new = first.sigmoid_(), second.tanh_()
    return torch.cat([opened * new, opened - new], dim=1)


def told_by_no_version(change: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    """The change, and then what saves `a` once more: as plain torch does, all earlier saves see the change."""

    def run(a: Tensor, b: Tensor) -> Tensor:
        change(a, b)
        return a * a.cos() + b

    return run


def through_numpy(a: Tensor, b: Tensor) -> None:
    a.detach().numpy()[::2] *= 0.5


def noise_twice(a: Tensor, b: Tensor) -> Tensor:
    """The operator is given the noise that it fills, and that it has filled and saved before: it is filled again."""
    noise = torch.empty_like(a)
    first = torch.ops.aten.rrelu_with_noise(a, noise, 0.1, 0.9, True)
    return first + torch.ops.aten.rrelu_with_noise(b, noise, 0.1, 0.9, True)  # type: ignore[no-any-return]


NEW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda a, b: a.sin(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "softmax": lambda a, b: a.softmax(-1),
    "relu": lambda a, b: a.relu(),
    "mul": lambda a, b: a * b,
    "matmul": lambda a, b: a @ b,
    "matmul of a transpose": lambda a, b: a @ b.t(),
    "where": lambda a, b: torch.where(a > 0, a, b * b),
    "halves": lambda a, b: torch.cat([half * half.sigmoid() for half in a.chunk(2)]),
    "columns": lambda a, b: torch.cat([half.tanh() for half in (a @ b).split(SIDE // 2, dim=1)], dim=1),
    "expand": lambda a, b: (a.unsqueeze(0).expand(3, SIDE, SIDE) * b).sum(0),
    "every second row": lambda a, b: torch.cat([a[::2] * b[1::2], (a[1::2] * 0.5).sin()]),
    "transpose": lambda a, b: a.t(),
    "another view": lambda a, b: a.reshape(-1).as_strided((SIDE, SIDE), (1, SIDE)),
    "gates": gates,
    "detach": lambda a, b: a.detach(),
    "clone": lambda a, b: a.clone(),
    "fills late": lambda a, b: nn.functional.rrelu(a, training=True),
    "fills late, again": noise_twice,
    ".data": told_by_no_version(lambda a, b: a.data.clamp_(-0.2, 0.2)),
    "numpy": told_by_no_version(through_numpy),
    "norm": lambda a, b: nn.functional.layer_norm(a, (SIDE,)),
    "function": lambda a, b: Twice.apply(a),  # type: ignore[no-untyped-call,no-any-return]
    "checkpoint": lambda a, b: checkpoint(lambda x, y: (x * y).sin() @ y, a, b, use_reentrant=False),  # type: ignore[no-any-return]
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda a, b: a.add_(0.5),
    "mul_": lambda a, b: a.mul_(b.detach()),
    "sigmoid_": lambda a, b: a.sigmoid_(),
    "relu_": lambda a, b: a.relu_(),
    "copy_": lambda a, b: a.copy_(b),
    "rows.mul_": lambda a, b: a[:4].mul_(2.0),
    "through detach": lambda a, b: a.detach().add_(0.25),
}


@dataclass(frozen=True)
class Step:
    what: str
    a: int
    b: int
    forget: bool  # the first operand, if it is no leaf: only the graph holds it then


numbers = st.integers(0, 30)
steps = st.builds(Step, st.sampled_from([*NEW, *NEW, *IN_PLACE]), numbers, numbers, st.booleans())
ENDS = ("once", "twice", "two losses", "second derivative", "some inputs", "dropped")


def play(program: list[Step], end: str, around: AbstractContextManager[object]) -> Bits:
    """The bits of all gradients. Raises RuntimeError where torch refuses a change in place."""
    memory = fresh()
    torch.manual_seed(7)
    with around:
        for step in program:
            a, b = memory.at(step.a), memory.at(step.b)
            if step.what in IN_PLACE:
                if not a.is_leaf or not a.requires_grad:
                    IN_PLACE[step.what](a, b)
            else:
                memory.live.append(NEW[step.what](a, b))
                if step.forget and not any(a is leaf for leaf in memory.leaves) and len(memory.live) > 5:
                    memory.live = [each for each in memory.live if each is not a]
        wanted = [each for each in memory.live[-4:] if each.requires_grad]
        losses = [(each * (2 + number)).sum() for number, each in enumerate(wanted)]
    del memory.live
    found = backward(losses, memory.leaves, end) if losses else []
    return tuple(each.numpy().tobytes() for each in found)


def backward(losses: list[Tensor], leaves: list[Tensor], end: str) -> list[Tensor]:
    loss = torch.stack(losses).sum()
    match end:
        case "dropped":
            return []
        case "twice":
            loss.backward(retain_graph=True)
            loss.backward()
        case "two losses":
            losses[0].backward(retain_graph=True)
            loss.backward()
        case "second derivative":
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            again = [each.square().sum() for each in first if each is not None and each.requires_grad]
            if again:
                torch.stack(again).sum().backward()
        case "some inputs":
            return [each for each in torch.autograd.grad(loss, leaves[:1], allow_unused=True) if each is not None]
        case _:
            loss.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def outcome(program: list[Step], end: str, around: AbstractContextManager[object]) -> Bits | str:
    try:
        return play(program, end, around)
    except RuntimeError as refused:
        if not re.search("in.?place", str(refused)):
            raise
        return "refused"


def nothing_is_left(made: ActivationOffload) -> bool:
    """After the graphs are gone. The engine of autograd keeps what a failed backward left undone until the next one."""
    torch.zeros((), requires_grad=True).backward()
    gc.collect()
    made.close()
    stats = made.stats()
    return stats.live_bytes == 0 and all(device.used_bytes == 0 for device in stats.devices)


class Dawdling:
    """A drive whose calls take now no time, now a moment: requests overlap with everything."""

    def __init__(self, seed: int) -> None:
        self.name = "dawdling"
        self._random = random.Random(seed)
        self._inner = MemoryEngine()

    def slow(self) -> IoEngine:
        return ThrottledEngine(self._inner, bytes_per_s=1e9, sleep=lambda _: self._nap())

    def _nap(self) -> None:
        if self._random.random() < 0.3:
            torch.ones(64, 64).sum()  # no random numbers: the program draws them
            gc.collect(0)


def offload(engine: IoEngine, *, limit_bytes: int | None, threads: int) -> ActivationOffload:
    config = OffloadConfig(
        dirs=("/",),
        quota=4 << 20,
        memory_limit=limit_bytes,
        min_bytes=TENSOR_BYTES // 2,
        threads_per_device=threads,
        deadline_s=20.0,
    )
    return ActivationOffload(config, engines=[engine])


programs = st.lists(steps, min_size=1, max_size=24)
limits = st.sampled_from([None, 64 * TENSOR_BYTES, 24 * TENSOR_BYTES])  # a program holds up to 18 itself


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples // 5)
@given(programs, st.sampled_from(ENDS), limits, st.integers(1, 3), st.integers(0, 1000))
def test_a_program_gives_the_same_bits_or_is_refused_where_torch_refuses_it(
    program: list[Step], end: str, limit_bytes: int | None, threads: int, seed: int
) -> None:
    expected = outcome(program, end, nullcontext())
    made = offload(Dawdling(seed).slow(), limit_bytes=limit_bytes, threads=threads)
    for _ in range(3):  # before anything was measured, with a plan, with a plan of that
        assert outcome(program, end, made) == expected
    assert nothing_is_left(made)


faults = st.sampled_from(["write_fails_after", "read_fails_after", "full_after", "vanishes_after", "flips_after"])


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples // 5)
@given(programs, st.sampled_from(ENDS), limits, faults, st.integers(0, 12))
def test_a_faulty_drive_is_an_error_or_no_difference_and_never_a_wrong_gradient(
    program: list[Step], end: str, limit_bytes: int | None, fault: str, after: int
) -> None:
    expected = outcome(program, end, nullcontext())
    made = offload(FaultyEngine(MemoryEngine(), EngineFaults(**{fault: after})), limit_bytes=limit_bytes, threads=2)
    for _ in range(3):
        with suppress(OffloadError):
            assert outcome(program, end, made) == expected
    assert nothing_is_left(made)
