"""The tracing pass: one forward of the user's unmodified code with every block on fakes, which records the block graph.

It finds the order of the blocks, what each returns and takes, its FLOPs, and at which cuts no member may begin.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from elastrain.errors import ConfigError
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.stubs.draws import TracedDraws
from elastrain.pipeline.stubs.fakes import BlockOutputs, Fakes, Given, given, left_as_it_was, not_compiled
from elastrain.pipeline.stubs.module_state import BeforePass, KeptByModules
from elastrain.pipeline.stubs.naming import is_fake, leaves_of, mapped
from elastrain.pipeline.stubs.origins import CodeBetween, Origins
from elastrain.pipeline.stubs.placeholders import Entries, Forward, check_caller_not_compiled
from elastrain.pipeline.stubs.recording import EnteredBlock, SeenEntry, graph_of_entries
from elastrain.pipeline.stubs.saved_bytes import Saving
from elastrain.pipeline.stubs.stateful_blocks import Handed
from elastrain.pipeline.stubs.uses import check_entry


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The block graph, and what stubs have to know besides. Tensors go by numbers, in order of first appearance."""

    graph: BlockGraph
    outputs: tuple[Mapping[Given, BlockOutputs], ...]
    """By place in the graph: what the block returns for what it was given."""
    entries: tuple[tuple[SeenEntry, ...], ...]
    """By place: what was seen each time that the forward entered the block."""
    crossing: tuple[tuple[int, ...], ...]
    """By cut: the numbers of what crosses it, in the order in which it is sent."""
    saved: tuple[int, ...]
    """By place in the graph: bytes that the block's forward keeps for its backward."""
    keeping: frozenset[int]
    """Places of the blocks whose forward leaves something else in its modules, where no other block finds it."""
    draws: TracedDraws
    counted: Mapping[tuple[str, str], tuple[float, float]]
    """Numbers in attributes of modules that the forward has changed, from what to what."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All blocks: those that the tracing pass left out come behind those of the graph."""
        return (*self.graph.blocks, *(name for name, _ in self.graph.never_entered))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Of each in the graph: of one that the tracing pass left out, its neighbour's."""
        beside = (self.graph.blocks.index(neighbour) for _, neighbour in self.graph.never_entered)
        return (*range(len(self.graph.blocks)), *beside)

    @cached_property
    def made(self) -> Mapping[int, tuple[int, int | None]]:
        """Number of what a block returns -> the block's place, and the number of what it took first."""
        seen = [(place, entry) for place, entries in enumerate(self.entries) for entry in entries]
        first = {id(entry): next((entry.taken[index] for index in sorted(entry.taken)), None) for _, entry in seen}
        return {number: (place, first[id(entry)]) for place, entry in seen for number in entry.returned.values()}

    def numbers(self, place: int, entry: int) -> SeenEntry:
        """Of a block that is entered so often already; none where the tracing pass did not enter it again."""
        return self.entries[place][entry] if entry < len(self.entries[place]) else SeenEntry({}, {})


class TracingPass:
    """`begin` before the user's body runs on a batch, `finish` when it calls `step.backward`."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Raises ConfigError for a model that is compiled as a whole."""
        self._model = model
        self._blocks = tuple(blocks)
        self._fakes = Fakes()
        self._saving = Saving(model, self._fakes)
        self._entered: list[EnteredBlock] = []
        self._places: dict[int, int] = {}
        """Place among `blocks` -> place in the graph."""
        self._origins = Origins(model, self._blocks)
        self._between = CodeBetween(self._origins)
        self._entries = Entries(model, self._blocks, self._enter)
        self._stack = contextlib.ExitStack()
        called = self._between.called
        for name in self._blocks:
            hook = model.get_submodule(name).register_forward_pre_hook(lambda *_, it=name: called.append(it))
            self._stack.callback(hook.remove)
        self._has_grad = True
        self._before: BeforePass | None = None

    def begin(self) -> None:
        self._has_grad = torch.is_grad_enabled()
        self._before = BeforePass(self._model)
        for hook in self._before.handles:
            self._stack.callback(hook.remove)
        self._stack.callback(KeptByModules(self._model).give_back)
        # Also of code around blocks, which a compiler that comes upon an entry would end with a long traceback.
        self._stack.enter_context(not_compiled())
        self._stack.enter_context(self._between)

    def abandon(self) -> None:
        """Take everything off the model again."""
        self._stack.close()
        self._entries.close()

    def finish(self) -> TracedModel:
        """Take everything off the model, and say what was found. Raises ConfigError: no block, or hooks of the body."""
        assert self._before is not None, "it has begun"
        counted = self._before.counted()
        try:
            self._before.check_hooks()
        finally:
            self.abandon()
        if not self._entered:
            raise ConfigError(f"the forward entered none of the blocks {list(self._blocks)}: name those that it calls")
        draws = self._between.finish(len(self._entered))
        held = Counter(x for name in self._blocks for x in KeptByModules(self._model.get_submodule(name)).things)
        graph, crossing = graph_of_entries(self._blocks, self._places, self._entered, self._origins)
        return TracedModel(
            graph=graph,
            outputs=tuple(each.outputs for each in self._entered),
            entries=tuple(tuple(each.entries) for each in self._entered),
            crossing=crossing,
            saved=tuple(each.saved_bytes for each in self._entered),
            keeping=frozenset(
                place
                for place, each in enumerate(self._entered)
                if each.changed and all(held[x] < 2 for x in each.changed)
            ),
            draws=draws,
            counted=counted,
        )

    def _enter(self, place: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._between.paused():
            check_caller_not_compiled()
            name = self._blocks[place]
            if self._has_grad and not torch.is_grad_enabled():
                # Reentrant checkpointing: it would connect gradients to fakes.
                raise ConfigError(
                    f"block {name!r} runs without gradients inside of the forward: with checkpointing pass "
                    "use_reentrant=False; freeze blocks by requires_grad_(False), and not by torch.no_grad()"
                )
            at = self._places.setdefault(place, len(self._entered))
            leaves = leaves_of((args, kwargs))
            check_entry(name, leaves)
            if self._model.get_submodule(name)._compiled_call_impl is not None:  # its hooks are behind the entry
                self._between.called.append(name)
            self._between.enter(at, name, leaves)
            taken = {i: self._origins.number(leaf) for i, leaf in enumerate(leaves) if is_fake(leaf)}
            if self._model.get_submodule(name)._get_backward_hooks()[0]:  # type: ignore[no-untyped-call]  # of torch
                self._origins.hooked(at, list(filter(is_fake, leaves)))
            activations = list(filter(is_fake, leaves))
            versions = [each._version for each in activations]
            self._origins.given(activations)
            with self._between.inside():
                returned, costs = self._run(name, forward, args, kwargs)
            self._origins.changed(
                [x for x, version in zip(activations, versions, strict=True) if x._version != version]
            )
            check_entry(name, leaves_of(returned))
            outputs = BlockOutputs.of(returned, self._model.get_submodule(name))
            if at == len(self._entered):
                self._entered.append(EnteredBlock(place))
            self._entered[at].outputs[given(leaves, kwargs)] = outputs
            # Fresh ones: what a block returned as it came in would belong to two blocks.
            made = outputs.fakes(self._fakes)
            self._entered[at].enter(SeenEntry(taken, self._origins.returned(at, leaves_of(made))), *costs)
            return made

    def _run(
        self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[object, tuple[int, int, set[int]]]:
        """What the block returns, as fakes or, where it has no fake kernel, as zeros; what `EnteredBlock` counts."""
        handed, module = Handed(name, args, kwargs), self._model.get_submodule(name)
        with left_as_it_was(module) as changed:
            kept = KeptByModules(module)
            numbers = kept.numbers()
            counter = _Flops()
            try:
                with counter, self._saving as saved, self._fakes:
                    returned = forward(*args, **kwargs)
            except Exception:  # noqa: BLE001  a kernel may raise anything where it is given a fake
                # Some kernels do not know fakes, and blocks may read values of their own: zeros are values.
                kept.give_back()
                handed.check()
                zero_args, zero_kwargs = mapped(_zeros, (args, kwargs))
                handed = Handed(name, zero_args, zero_kwargs)
                counter = _Flops()
                with counter, self._saving as saved:
                    returned = forward(*zero_args, **zero_kwargs)
                if kept.numbers() != numbers or any(
                    not isinstance(each, Tensor | None) for each in leaves_of(returned)
                ):
                    self._between.reads()
            handed.check(returned)
            left = kept.changed()
            self._origins.written(changed(), [self._origins.at])
            saved.ran((args, kwargs), returned)
        return returned, (counter.get_total_flops(), saved.nbytes, left)


class _WholeBlock(contextlib.nullcontext[None]):
    parents = frozenset({"Global"})


class _Flops(FlopCounterMode):
    """Counts for the block as a whole. For modules inside torch hangs hooks on tensors, with which some models fail."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _WholeBlock()


def _zeros(leaf: object) -> object:
    if not is_fake(leaf):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)
