"""The tracing pass: one forward of the user's unmodified code with every block on fakes, which records the block graph.

It finds the order of the blocks, their arguments and results, their FLOPs, and the illegal cuts.
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
from elastrain.pipeline.stubs.generators import device_of
from elastrain.pipeline.stubs.module_state import BeforePass, KeptByModules
from elastrain.pipeline.stubs.naming import is_fake, leaves_of, mapped, module_of
from elastrain.pipeline.stubs.origins import CodeBetween, Origins
from elastrain.pipeline.stubs.placeholders import Entries, Forward, check_caller_not_compiled
from elastrain.pipeline.stubs.recording import EnteredBlock, SeenEntry, graph_of_entries
from elastrain.pipeline.stubs.saved_bytes import Saving
from elastrain.pipeline.stubs.stateful_blocks import Handed
from elastrain.pipeline.stubs.uses import check_entry
from elastrain.pipeline.stubs.warm_up import BlockEntry


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The block graph, and all else that stubs need. Tensors are numbered in order of first appearance."""

    graph: BlockGraph
    outputs: tuple[Mapping[Given, BlockOutputs], ...]
    """By place in the graph: the block's result for each key of arguments."""
    entries: tuple[tuple[SeenEntry, ...], ...]
    """By place: one record for each time that the forward entered the block."""
    crossing: tuple[tuple[int, ...], ...]
    """By cut: the numbers of the tensors that cross it, in the order in which they are sent."""
    devices: tuple[tuple[torch.device, ...], ...]
    """By cut: the device of each tensor that crosses it, in the same order."""
    saved: tuple[int, ...]
    """By place in the graph: bytes that the block's forward keeps for its backward."""
    keeping: frozenset[int]
    """Places of blocks whose forward leaves something in its modules that no other block can find."""
    draws: TracedDraws
    first: tuple[BlockEntry | None, ...]
    """By place: the block's first entry, for a later forward on zeros."""
    counted: Mapping[tuple[str, str], tuple[float, float]]
    """Numbers in module attributes that the forward has changed -> (before, after)."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All blocks: those of the graph, then those that the tracing pass left out."""
        return (*self.graph.blocks, *(name for name, _ in self.graph.never_entered))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Place of every block in the graph. A block that the tracing pass left out has the place of its neighbour."""
        beside = (self.graph.blocks.index(neighbour) for _, neighbour in self.graph.never_entered)
        return (*range(len(self.graph.blocks)), *beside)

    @cached_property
    def made(self) -> Mapping[int, tuple[int, int | None]]:
        """Number of a tensor that a block returns -> (place of the block, number of the first tensor that it took)."""
        seen = [(place, entry) for place, entries in enumerate(self.entries) for entry in entries]
        first = {id(entry): next((entry.taken[index] for index in sorted(entry.taken)), None) for _, entry in seen}
        return {number: (place, first[id(entry)]) for place, entry in seen for number in entry.returned.values()}

    def numbers(self, place: int, entry: int) -> SeenEntry:
        """Return the record of entry number `entry` of a block, or an empty `SeenEntry` if there was none."""
        return self.entries[place][entry] if entry < len(self.entries[place]) else SeenEntry({}, {})


class TracingPass:
    """The recorder of the pass.

    Call `begin` before the user's body runs on a batch, `finish` when it calls `step.backward`.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Put the recording entries into the model. Raises CutError if the model is compiled as a whole."""
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
            hook = module_of(model, name).register_forward_pre_hook(lambda *_, it=name: called.append(it))
            self._stack.callback(hook.remove)
        self._has_grad = True
        self._before: BeforePass | None = None

    def begin(self) -> None:
        """Begin the pass."""
        self._has_grad = torch.is_grad_enabled()
        self._before = BeforePass(self._model)
        for hook in self._before.handles:
            self._stack.callback(hook.remove)
        self._stack.callback(KeptByModules(self._model).give_back)
        # Compilation is off for code around blocks, too: a compiler that finds an entry would fail with a long
        # traceback.
        self._stack.enter_context(not_compiled())
        self._stack.enter_context(self._between)

    def abandon(self) -> None:
        """Remove all hooks and entries from the model."""
        self._stack.close()
        self._entries.close()

    def finish(self) -> TracedModel:
        """Remove everything from the model and return the result.

        Raises ConfigError if no block was entered, or if the loop body registered hooks.
        """
        assert self._before is not None, "it has begun"
        counted = self._before.counted()
        try:
            self._before.check_hooks()
        finally:
            self.abandon()
        if not self._entered:
            raise ConfigError(f"the forward entered none of the blocks {list(self._blocks)}: name those that it calls")
        draws = self._between.finish(len(self._entered))
        held = Counter(x for name in self._blocks for x in KeptByModules(module_of(self._model, name)).things)
        graph, crossing = graph_of_entries(self._blocks, self._places, self._entered, self._origins)
        return TracedModel(
            graph=graph,
            outputs=tuple(each.outputs for each in self._entered),
            entries=tuple(tuple(each.entries) for each in self._entered),
            crossing=crossing,
            devices=tuple(tuple(self._origins.shapes[number].device for number in cut) for cut in crossing),
            saved=tuple(each.saved_bytes for each in self._entered),
            keeping=frozenset(
                place
                for place, each in enumerate(self._entered)
                if each.changed and all(held[x] < 2 for x in each.changed)
            ),
            draws=draws,
            first=tuple(each.first for each in self._entered),
            counted=counted,
        )

    def _enter(self, place: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._between.paused():
            check_caller_not_compiled()
            name = self._blocks[place]
            if self._has_grad and not torch.is_grad_enabled():
                # Reentrant checkpointing runs blocks without gradients, and would connect gradients to fakes.
                raise ConfigError(
                    f"block {name!r} runs without gradients inside of the forward: with checkpointing pass "
                    "use_reentrant=False; freeze blocks by requires_grad_(False), and not by torch.no_grad()"
                )
            at = self._places.setdefault(place, len(self._entered))
            leaves = leaves_of((args, kwargs))
            check_entry(name, leaves)
            if module_of(self._model, name)._compiled_call_impl is not None:  # its hooks are behind the entry
                self._between.called.append(name)
            self._between.enter(at, name, leaves)
            taken = {i: self._origins.number(leaf) for i, leaf in enumerate(leaves) if is_fake(leaf)}
            if module_of(self._model, name)._get_backward_hooks()[0]:  # type: ignore[no-untyped-call]  # of torch
                self._origins.hooked(at, list(filter(is_fake, leaves)))
            first = None
            if at == len(self._entered):
                first = BlockEntry.of(args, kwargs, device_of(self._model))
            activations = list(filter(is_fake, leaves))
            versions = [each._version for each in activations]
            self._origins.given(activations)
            with self._between.inside():
                returned, costs = self._run(name, forward, args, kwargs)
            self._origins.changed(
                [x for x, version in zip(activations, versions, strict=True) if x._version != version]
            )
            check_entry(name, leaves_of(returned))
            outputs = BlockOutputs.of(returned)
            if at == len(self._entered):
                self._entered.append(EnteredBlock(place, first))
            self._entered[at].outputs[given(leaves, kwargs)] = outputs
            # The results are new fakes: an argument that the block returned would otherwise belong to two blocks.
            made = outputs.fakes(self._fakes)
            self._entered[at].enter(SeenEntry(taken, self._origins.returned(at, leaves_of(made))), *costs)
            return made

    def _run(
        self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[object, tuple[int, int, set[int]]]:
        """Run a block and return its result, on fakes or, if it has no fake kernel, on zeros; also its costs.

        The costs are FLOPs, saved bytes and the ids of changed attributes, as `EnteredBlock` adds them up.
        """
        handed, module = Handed(name, args, kwargs), module_of(self._model, name)
        with left_as_it_was(module) as changed:
            kept = KeptByModules(module)
            numbers = kept.numbers()
            counter = _Flops()
            try:
                with counter, self._saving as saved, self._fakes:
                    returned = forward(*args, **kwargs)
            except Exception:  # noqa: BLE001  a kernel may raise anything where it is given a fake
                # Some kernels do not support fakes, and blocks may read values of their own: zeros are values.
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
    """A FLOP counter for the block as a whole.

    torch's per-module counts put hooks on tensors, with which some models fail.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _WholeBlock()


def _zeros(leaf: object) -> object:
    if not is_fake(leaf):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)
