"""Uses of parameters in a tracing pass, and refusals of gradients taken by code between blocks.

`ParameterUses` finds blocks that must stay together because one uses a parameter of another. The guards raise
ConfigError if code between blocks differentiates through blocks that another member computes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, graph

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.fakes import Fakes
from elastrain.pipeline.stubs.naming import is_fake, leaves_of, plain_name
from elastrain.pipeline.stubs.passes import ReceivedCopy
from elastrain.pipeline.stubs.placeholders import AbsentParameter

_END = sys.maxsize
"""A place behind all blocks."""


class ParameterUses:
    """A record of each use of a parameter in a tracing pass, and of the blocks that have to stay together for it."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._registered = _registered(model, blocks)
        self._made: dict[int, tuple[Tensor, frozenset[int]]] = {}
        """By id: a real tensor that was made from parameters, and their ids. The tensor is kept so that its id is not
        reused.
        """
        self._memory = {_address(q): frozenset([id(q)]) for q in model.parameters()}
        """Parameter ids by memory address. It finds tensors that no operation returns, such as those of
        `copy.deepcopy`.
        """
        self._uses: set[tuple[int, int]] = set()
        """(id of a parameter, place of the block in or behind which it was used; -1 before all)."""

    def used(self, tensors: Sequence[Tensor], at: int) -> None:
        """Note that the block at this place, or code behind it, used these tensors."""
        self._uses |= {(key, at) for key in self._sources(tensors)}

    def read(self, tensors: Sequence[Tensor], at: int) -> None:
        """Note that code behind this block read the values of these tensors, and may use them anywhere later."""
        self.used(tensors, at)
        self.used(tensors, _END)

    def made_between(self, operation: str, taken: Sequence[Tensor], made: Sequence[Tensor], at: int) -> None:
        """Note what code behind this block made from these tensors.

        A result that is an activation is a use of the parameters. Any other result counts only where it is used.
        """
        if any(is_fake(tensor) for tensor in made):
            self.used(taken, at)
        elif not operation.startswith("new_") and not operation.endswith("_like"):
            sources = self._sources(taken)
            for tensor in made:
                if sources and id(tensor) not in self._registered:
                    self._made[id(tensor)] = tensor, sources
                    self._memory[_address(tensor)] = sources

    def together(self, order: Sequence[str], neighbours: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
        """Yield (first, last, why): no cut may lie between the first and the last block.

        Args:
            order: Names of the blocks by place.
            neighbours: A block that was never entered -> the block that it stays with.
        """
        places = {name: place for place, name in enumerate(order)}
        places |= {name: places[beside] for name, beside in neighbours.items()}
        for key, at in sorted(self._uses, key=lambda use: (use[1], self._registered[use[0]][0])):
            (name, blocks), used_at = self._registered[key], min(max(at, 0), len(order) - 1)
            homes = {places[block]: block for block in sorted(blocks)}
            if used_at in homes:
                continue
            # Parameters outside of all blocks belong to the first block.
            home = min(homes, key=lambda place: abs(place - used_at), default=0)
            where = f"belongs to block {homes[home]!r}" if homes else "lies outside of blocks"
            beside = f"at {order[used_at]!r}" if homes else f"behind block {order[used_at]!r}"
            first, last = sorted((home, used_at))
            yield first, last, f"parameter {name!r} {where} and is used {beside}"

    def _sources(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        found: set[int] = set()
        for tensor in tensors:
            if id(tensor) in self._registered:
                found.add(id(tensor))
            elif id(tensor) in self._made:
                found |= self._made[id(tensor)][1]
            elif address := _address(tensor):
                found |= self._memory.get(address, frozenset())
        return frozenset(found)


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's memory, or 0 if it has no ordinary memory."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.data_ptr() if is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) else 0


def _registered(model: nn.Module, blocks: Sequence[str]) -> dict[int, tuple[str, frozenset[str]]]:
    """Return, by id of a parameter, its first name and the blocks in which it is registered."""
    found: dict[int, tuple[str, frozenset[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        of = {block for block in blocks if plain_name(name).startswith(f"{block}.")}
        first, before = found.get(id(parameter), (name, frozenset()))
        found[id(parameter)] = (first, before | of)
    return found


_WHY = "which do not go through blocks that another member computes: do that in a block, or train without --stages"
_allowed: list[None] = []
"""One entry for each block, and each backward of a member, that runs now."""


@contextlib.contextmanager
def allowed_gradients() -> Iterator[None]:
    """Allow a block, or the backward of a member, to take gradients."""
    _allowed.append(None)
    try:
        yield
    finally:
        _allowed.pop()


def check_entry(block: str, leaves: Sequence[object]) -> None:
    """Raise ConfigError if a block is entered within `torch.func`, in forward mode, or with a nested tensor."""
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
        # The fake mode is active inside a block on fakes, but not in code between blocks.
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
    """Return True if a received tensor went into the outputs."""
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


# The only entry of torch into its engine, which `backward`, `grad` and all their users call. Torch imports it twice.
torch.autograd._engine_run_backward = graph._engine_run_backward = _guarded(graph._engine_run_backward)  # type: ignore[attr-defined]
