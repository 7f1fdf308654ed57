"""Captured graphs of the device, with the names and the strictness of `torch.cuda`'s.

A graph keeps the operators that its thread submits between begin and end, with the tensors that they use. A replay runs
them again on the same memory and calls no Python of the program. Unlike CUDA, capturing computes, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from tests.support.late import kernels
from tests.support.late.order import this_thread

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


class Graph:
    """Work that was captured once and can be submitted again."""

    def __init__(self) -> None:
        self._work: list[kernels.Captured] = []

    def capture_begin(self, *_: object, **__: object) -> None:
        host = this_thread()
        if host.captured is not None:
            raise RuntimeError("LATE error: operation not permitted when stream is capturing")
        self._work = host.captured = []

    def capture_end(self) -> None:
        this_thread().captured = None

    @torch.no_grad()
    def replay(self) -> None:
        for operator, args, kwargs, made in self._work:
            again = kernels.run(operator, *args, **kwargs)
            for before, now in zip(_tensors(made), _tensors(again), strict=True):
                if before is not now and before.data_ptr() != now.data_ptr():
                    kernels.run(torch.ops.aten.copy_.default, before, now)


def _tensors(made: Any) -> list[Tensor]:
    values = made if isinstance(made, list | tuple) else [made]
    return [each for each in values if isinstance(each, Tensor) and each.numel()]


@contextmanager
def capture(graph: Graph, *_: object, **__: object) -> Iterator[None]:
    """Capture the body, as `torch.cuda.graph` does."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


def is_capturing() -> bool:
    """Return True while this thread captures. Autograd's threads count as the thread that called `backward`."""
    return this_thread().captured is not None


def make_graphed_callables(module: nn.Module, sample_args: Sequence[Tensor], **_: object) -> nn.Module:
    """Replace the module's forward by replays of its forward and backward; only for modules that return one tensor."""
    if any(getattr(each, hooks) for each in module.modules() for hooks in _HOOKS):
        raise RuntimeError("Modules must not have hooks registered at the time they are passed.")
    inputs, parameters = tuple(sample_args), tuple(p for p in module.parameters() if p.requires_grad)
    wanted = tuple(each for each in inputs if each.requires_grad) + parameters
    ahead, back = Graph(), Graph()
    with capture(ahead):
        made = module(*inputs)
    of_made = torch.empty_like(made).zero_()
    with capture(back):
        gradients = torch.autograd.grad((made,), wanted, (of_made,))

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            for mine, its in zip(inputs, given, strict=False):
                mine.data.copy_(its)
            ahead.replay()
            return cast(Tensor, made.detach())

        @staticmethod
        def backward(ctx: Any, *of: Tensor) -> tuple[Tensor | None, ...]:
            of_made.copy_(of[0])
            back.replay()
            left = iter(gradients)
            return tuple(
                next(left).detach() if any(each is w for w in wanted) else None for each in inputs + parameters
            )

    def make_graphed_forward(plain: Any, training: bool) -> Any:
        def new_fwd(*given: Tensor) -> Any:
            replayed: Any = Graphed
            return replayed.apply(*given, *parameters) if module.training == training else plain(*given)

        return new_fwd

    module.forward = make_graphed_forward(module.forward, module.training)
    return module
