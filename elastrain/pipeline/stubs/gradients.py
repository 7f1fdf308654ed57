"""The sentences where code between blocks differentiates through blocks that another member computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, graph

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.absent import AbsentParameter
from elastrain.pipeline.stubs.fakes import Fakes
from elastrain.pipeline.stubs.passes import ReceivedCopy
from elastrain.pipeline.stubs.trees import is_fake, leaves_of

_WHY = "which do not go through blocks that another member computes: do that in a block, or train without --stages"
_allowed: list[None] = []
"""One entry for each block, and each backward of a member, that is under way."""


@contextlib.contextmanager
def allowed_gradients() -> Iterator[None]:
    """Let a block, or the backward of a member, take gradients."""
    _allowed.append(None)
    try:
        yield
    finally:
        _allowed.pop()


def check_entry(block: str, leaves: Sequence[object]) -> None:
    """Raises ConfigError where a block is entered in `torch.func`, in forward mode, or with a nested tensor."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise ConfigError(
            f"block {block!r} is entered within transforms of torch.func or forward-mode differentiation, {_WHY}"
        )
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        raise ConfigError(
            f"block {block!r} takes or returns a nested tensor, and these cannot be handed on between members: "
            "pad the batch to one length, or train without --stages"
        )


def _guarded(run: Any) -> Any:
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_own = _allowed or torch._C._current_graph_task_id() != -1
        # A block on fakes runs under the mode; code between blocks does not.
        is_own = is_own or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if not is_own and (any(map(_is_ours, leaves_of((outputs, args)))) or _has_entered(outputs)):
            how = "backward" if kwargs.get("accumulate_grad") else "torch.autograd.grad"
            raise ConfigError(
                f"code between blocks takes gradients of activations by {how}, outside of step.backward, {_WHY}"
            )
        return run(outputs, *args, **kwargs)

    return run_backward


def _is_ours(leaf: object) -> bool:
    return is_fake(leaf) and isinstance(leaf.fake_mode, Fakes)  # type: ignore[attr-defined]


def _has_entered(outputs: Sequence[Tensor]) -> bool:
    """Return True if something that was received went into the outputs."""
    nodes = [each.grad_fn for each in outputs] if AbsentParameter.computing else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if getattr(node, "_forward_cls", None) is ReceivedCopy:
            return True
        new = {each for each, _ in (() if node is None else node.next_functions)} - seen
        seen |= new
        nodes += new
    return False


# The one way of torch into its engine, for `backward`, `grad`, and all that is made of these. Torch imports it twice.
torch.autograd._engine_run_backward = graph._engine_run_backward = _guarded(graph._engine_run_backward)  # type: ignore[attr-defined]
