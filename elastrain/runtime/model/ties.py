"""Tied weights: each block's part of the gradient is kept separately, and the model keeps one nn.Parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.job.layout import Layout
from elastrain.offload.original_hooks import OriginalsHook
from elastrain.runtime.model.partition import Registration

Land = Callable[[Tensor], Tensor | None]
"""A function that gets the gradient of one block's use of a weight. Returns None if it took the gradient, else the
gradient that is passed on to the weight."""


class _View(torch.autograd.Function):
    """A view of a tied weight for one block, whose gradient goes to `land` first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, land: Land) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Land], output: Tensor) -> None:
        ctx.land = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        return (None if gradient is None else ctx.land(gradient)), None


class LaterUse:
    """The places of a tied weight in a block after the first. While the block runs, a view of the weight is in them.

    The view leads back to the weight, so gradients outside of steps reach the weight as they would without the view.
    """

    def __init__(self, block: nn.Module, places: Sequence[Registration], flat: int, land: Land) -> None:
        """Put hooks on the block and on the modules of the places. `flat`: the flat that contains the weight."""
        self.weight: nn.Parameter = getattr(places[0].module, places[0].attribute)
        self.flat = flat
        self._places = places
        self._land = land
        self._depth = 0
        self._replaced: list[Registration] = []
        self._view: nn.Parameter | None = None
        self._hooks = [
            hook
            for module in dict.fromkeys((block, *(place.module for place in places)))
            for hook in (
                # Before the script's hooks, because they may use the weight, as those of weight_norm do.
                module.register_forward_pre_hook(OriginalsHook(self._enter), prepend=True),
                module.register_forward_hook(OriginalsHook(self._leave), always_call=True),
            )
        ]

    def forget(self) -> None:
        """Drop the view, because the weight has new memory. Any thread may call it while the block does not compute."""
        self._view = None

    def forward_is_over(self) -> None:
        """Put the weight back in its places, also after a KeyboardInterrupt in the block, and drop the view."""
        # All entries of one forward share a view, so that its gradient comes once. A view of an older forward would get
        # its gradient last, because autograd visits the newest nodes first.
        self._restore()
        self.forget()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.forward_is_over()

    def _restore(self) -> None:
        self._depth = 0
        for place in self._replaced:
            place.module._parameters[place.attribute] = self.weight
        self._replaced = []

    def _enter(self, *_: object) -> None:
        self._depth += 1
        # A view that is made inside of torch.vmap or a similar transform would belong to the transform.
        is_plain = torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None
        if not self.weight.requires_grad or not is_plain:
            return
        for place in self._places:
            if place.module._parameters.get(place.attribute) is self.weight:  # not so under functional_call
                if self._view is None:
                    made: Tensor = _View.apply(self.weight, self._land)  # type: ignore[no-untyped-call]
                    self._view = made.as_subclass(nn.Parameter)  # for code that checks the type
                place.module._parameters[place.attribute] = self._view
                self._replaced.append(place)

    def _leave(self, *_: object) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._restore()


def _has_hooks(weight: Tensor) -> bool:
    """Return True if the script has registered hooks on the weight, besides the one of the runtime."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks or ()) > 1


class Ties:
    """The later uses of a model's tied weights. A weight with hooks has one gradient, in the first block's leaf."""

    def __init__(self, layout: Layout, readers: Mapping[int, Sequence[int]], *, apart: bool) -> None:
        """Start without uses. `readers`: by flat, the blocks that read it. `apart`: members hold some blocks each."""
        self._layout, self._readers, self._apart = layout, readers, apart
        self.uses: dict[int, LaterUse] = {}
        """The later uses, by leaf."""

    def are_told_apart(self, weight: Tensor) -> bool:
        """Return True if each block that uses the weight has its own gradient leaf. Hooks need the sum instead."""
        return any(use.weight is weight for use in self.uses.values()) and not _has_hooks(weight)

    def forget(self, flats: Collection[int]) -> None:
        """Drop the views of these flats, whose memory changed. Any thread may call it while no reader computes."""
        for use in self.uses.values():
            if use.flat in flats:
                use.forget()

    def forward_is_over(self) -> None:
        """Put the weights back. Raises ConfigError for hooks on a weight whose blocks may be on different members."""
        for leaf, use in self.uses.items():
            use.forward_is_over()
            if self._apart and _has_hooks(use.weight):
                name = self._layout.parameters[self._layout.leaves[leaf].parameter].name
                blocks = ", ".join(repr(self._layout.blocks[block]) for block in self._readers[use.flat])
                raise ConfigError(
                    f"parameter {name!r} has a hook, and --stages may put its blocks {blocks} on different members, "
                    "where none has the whole gradient: remove the hook, or train without --stages"
                )

    def close(self) -> None:
        """Remove the hooks from the model."""
        for use in self.uses.values():
            use.close()
