"""A backward in two parts: first the gradient of what a task has received, later those of its weights.

The method is that of `torch.distributed.pipelining`. The first part computes only what leads to the received tensors,
and notes the gradients at the nodes where weights enter. The second part begins at these nodes. Both together compute
what a whole backward does, with the same bits: each weight's gradients are added in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, saved_tensors_hooks

from elastrain.pipeline.stubs.fakes import Unsaved
from elastrain.pipeline.stubs.passes import Ends, ReceivedCopy

_RECEIVED: type = ReceivedCopy._backward_cls
_FUNCTION: type = BackwardCFunction
_COMPILED = "CompiledFunctionBackward"
"""The name of the node of torch.compile. It gives its saved tensors away in its first backward."""


@dataclass(eq=False)
class WeightPart:
    """A node that leads to received tensors and to weights, with the weights to which it leads."""

    node: Node
    weights: list[GradientEdge]
    entered: tuple[Tensor | None, ...] = ()
    """The gradients with which the first part has entered the node."""

    def enter(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Note the gradients with which the backward enters the node."""
        self.entered = gradients

    def compute(self) -> None:
        """Compute the gradients of the weights, and accumulate them as a whole backward does, with all hooks."""
        edges = [(GradientEdge(self.node, i), each) for i, each in enumerate(self.entered) if each is not None]
        if edges:
            # The node's other outputs lead to received tensors, which are not among the inputs, and are left out.
            torch.autograd.backward([edge for edge, _ in edges], [each for _, each in edges], inputs=self.weights)


def backward_of_input(ends: Ends) -> list[WeightPart] | None:
    """Compute the gradients of the received tensors. Returns what is left, in the order of a whole backward.

    Returns None, without having computed anything, if the backward can only be computed whole.
    """
    found = _parts([tensor.grad_fn for tensor, _ in ends])
    if found is None:
        return None
    parts, received = found
    hooks = [part.node.register_prehook(part.enter) for part in parts]
    try:
        torch.autograd.backward(
            [tensor for tensor, _ in ends], [gradient for _, gradient in ends], retain_graph=True, inputs=received
        )
    finally:
        for hook in hooks:
            hook.remove()
    return parts


def backward_of_weights(parts: list[WeightPart]) -> None:
    """Compute what `backward_of_input` has left. Frees the saved tensors of each part as soon as it is computed."""
    while parts:
        parts.pop(0).compute()


def _parts(roots: Sequence[Node | None]) -> tuple[list[WeightPart], list[GradientEdge]] | None:
    """Return the parts, and the received tensors. None if the backward cannot be split."""
    order = _children_first([root for root in roots if root is not None])
    path, received = set[Node](), list[GradientEdge]()
    for node in order:
        if isinstance(node, _RECEIVED):
            leaves = [each for each, _ in node.next_functions if each is not None]
            path.update(leaves, [node])
            received += [GradientEdge(each, 0) for each in leaves]
        elif any(each in path for each, _ in node.next_functions):
            path.add(node)
    # What leads to no received tensor would be left out of the first part, although it begins with a gradient.
    if not received or not all(root in path for root in roots) or any(node.name() == _COMPILED for node in path):
        return None
    parts, owners = list[WeightPart](), dict[Node, Node]()
    for node in reversed(order):
        beside = [each for each, _ in node.next_functions if each is not None and each not in path]
        if node in path and beside:
            # A function of the script's own runs once in a whole backward, and would run twice.
            weights = None if isinstance(node, _FUNCTION) else _weights(node, beside, owners)
            if weights is None:
                return None
            parts.append(WeightPart(node, weights))
    return parts, received


def _children_first(roots: Sequence[Node]) -> list[Node]:
    order, stack = dict[Node, None](), list(roots)
    while stack:
        waiting = [each for each, _ in stack[-1].next_functions if each is not None and each not in order]
        if not waiting:
            order[stack.pop()] = None
        stack += waiting
    return list(order)


def _weights(node: Node, beside: list[Node], owners: dict[Node, Node]) -> list[GradientEdge] | None:
    """Return the leaves below a node's branches. None if another node leads to one of these branches, too.

    The sum of such gradients might be made in another order, and nodes in between would be computed twice.
    """
    found, stack = dict[Node, None](), list(beside)
    while stack:
        below = stack.pop()
        if owners.setdefault(below, node) is not node:
            return None
        if below not in found:
            found[below] = None
            stack += [each for each, _ in below.next_functions if each is not None]
    return [GradientEdge(below, 0) for below in found if not below.next_functions]


class HookWatch:
    """A context manager for a forward. It finds hooks that want each part of the backward to be computed once.

    Such hooks are those of checkpoints, which compute a part of the forward again, those that bring saved tensors back
    from a disk or another device, and hooks on activations.
    """

    def __init__(self) -> None:
        self.has_found = False
        self._replaced: list[tuple[type, str, Any]] = []

    def __enter__(self) -> HookWatch:
        self.has_found = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        for owner, name in ((saved_tensors_hooks, "__enter__"), (Tensor, "register_hook"), (Tensor, "retain_grad")):
            self._replaced.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self._noting(getattr(owner, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def noting(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self.has_found |= not isinstance(owner, Unsaved)
            return original(owner, *args, **kwargs)

        return noting


def has_backward_hooks(model: nn.Module) -> bool:
    """Return True if a hook is to be told of the backward of one of the model's modules, or of all modules."""
    everywhere = vars(nn.modules.module)
    of_all = (everywhere[f"_global_backward{kind}_hooks"] for kind in ("", "_pre"))
    return any(of_all) or any(each._backward_hooks or each._backward_pre_hooks for each in model.modules())
