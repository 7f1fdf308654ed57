"""Where a forward uses parameters, and what code between blocks has made of them: both are where their block is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from elastrain.pipeline.stubs.trees import is_fake

_END = sys.maxsize
"""The place behind all blocks."""


class ParameterUses:
    """Told of each use in a tracing pass; then says which blocks have to stay together for it."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._registered = _registered(model, blocks)
        self._made: dict[int, tuple[Tensor, frozenset[int]]] = {}
        """By id: a real tensor, kept so that no other gets its id, and the parameters that its values come from."""
        self._memory = {_address(q): frozenset([id(q)]) for q in model.parameters()}
        """By address: `copy.deepcopy` of a parameter or a module makes tensors that no operation returns."""
        self._uses: set[tuple[int, int]] = set()
        """(id of a parameter, place of the block behind or in which it was used; -1 before all)."""

    def used(self, tensors: Sequence[Tensor], at: int) -> None:
        """The block at this place took these, or code behind it."""
        self._uses |= {(key, at) for key in self._sources(tensors)}

    def read(self, tensors: Sequence[Tensor], at: int) -> None:
        """Code behind this block read their values, which it may use anywhere behind."""
        self.used(tensors, at)
        self.used(tensors, _END)

    def made_between(self, operation: str, taken: Sequence[Tensor], made: Sequence[Tensor], at: int) -> None:
        """Code behind this block made these: activations with a parameter, or what counts only where it is used."""
        if any(is_fake(tensor) for tensor in made):
            self.used(taken, at)
        elif not operation.startswith("new_") and not operation.endswith("_like"):
            sources = self._sources(taken)
            for tensor in made:
                if sources and id(tensor) not in self._registered:
                    self._made[id(tensor)] = tensor, sources
                    self._memory[_address(tensor)] = sources

    def together(self, order: Sequence[str], neighbours: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
        """(first, last, why): places between which nobody may begin.

        order: blocks by place. neighbours: a block that was never entered -> the one that it goes with.
        """
        places = {name: place for place, name in enumerate(order)}
        places |= {name: places[beside] for name, beside in neighbours.items()}
        for key, at in sorted(self._uses, key=lambda use: (use[1], self._registered[use[0]][0])):
            (name, blocks), used_at = self._registered[key], min(max(at, 0), len(order) - 1)
            homes = {places[block]: block for block in sorted(blocks)}
            if used_at in homes:
                continue
            # What lies outside of blocks goes with the first one.
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
    """0 where it has no memory of the usual kind."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.data_ptr() if is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor) else 0


def _registered(model: nn.Module, blocks: Sequence[str]) -> dict[int, tuple[str, frozenset[str]]]:
    """By id of a parameter: its first name, and the blocks in which it is registered."""
    found: dict[int, tuple[str, frozenset[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        of = {block for block in blocks if name.startswith(f"{block}.")}
        first, before = found.get(id(parameter), (name, frozenset()))
        found[id(parameter)] = (first, before | of)
    return found
