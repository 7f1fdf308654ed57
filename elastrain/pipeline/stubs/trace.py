"""The tracing pass: one forward of the user's unmodified code with every block on fakes, which records the block graph.

It finds the order of the blocks, what each returns and takes, its FLOPs, and at which cuts no member may begin.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from elastrain.errors import ConfigError
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.stubs.draws import TracedDraws
from elastrain.pipeline.stubs.entries import Entries, Forward, check_caller_not_compiled
from elastrain.pipeline.stubs.fakes import BlockOutputs, Fakes, device_of, is_fake
from elastrain.pipeline.stubs.handed import check_handed
from elastrain.pipeline.stubs.origins import CodeBetween, Origins
from elastrain.pipeline.stubs.recording import EnteredBlock, SeenEntry, graph_of_entries
from elastrain.pipeline.stubs.saving import Saving


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The block graph, and what stubs have to know besides. Tensors go by numbers, in order of first appearance."""

    graph: BlockGraph
    outputs: tuple[BlockOutputs, ...]
    """By place in the graph: what the block returns."""
    entries: tuple[tuple[SeenEntry, ...], ...]
    """By place: what was seen each time that the forward entered the block."""
    crossing: tuple[tuple[int, ...], ...]
    """By cut: the numbers of what crosses it, in the order in which it is sent."""
    saved: tuple[int, ...]
    """By place in the graph: bytes that the block's forward keeps for its backward."""
    draws: TracedDraws

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
        self._has_grad = True

    def begin(self) -> None:
        self._has_grad = torch.is_grad_enabled()
        # Also of code around blocks, which a compiler that comes upon an entry would end with a long traceback.
        self._stack.enter_context(_not_compiled())
        self._stack.enter_context(self._between)

    def abandon(self) -> None:
        """Take everything off the model again."""
        self._stack.close()
        self._entries.close()

    def finish(self) -> TracedModel:
        """Take everything off the model, and say what was found. Raises ConfigError where no block was entered."""
        self.abandon()
        if not self._entered:
            raise ConfigError(f"the forward entered none of the blocks {list(self._blocks)}: name those that it calls")
        draws = self._between.finish(len(self._entered))
        graph, crossing = graph_of_entries(self._blocks, self._places, self._entered, self._origins)
        return TracedModel(
            graph=graph,
            outputs=tuple(each.outputs for each in self._entered),
            entries=tuple(tuple(each.entries) for each in self._entered),
            crossing=crossing,
            saved=tuple(each.saved_bytes for each in self._entered),
            draws=draws,
        )

    # ----------------------------------------------------------------------------------------------------- at an entry

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
            is_again = place in self._places
            at = self._places.setdefault(place, len(self._entered))
            leaves, _ = tree_flatten((args, kwargs))
            self._between.enter(at, name, leaves)
            taken = {i: self._origins.number(leaf) for i, leaf in enumerate(leaves) if is_fake(leaf)}
            with self._between.inside():
                returned, costs = self._run(name, forward, args, kwargs)
            check_handed(name, [*leaves, *tree_flatten(returned)[0]])
            outputs = BlockOutputs.of(returned, device_of(self._model.get_submodule(name).parameters))
            if not is_again:
                self._entered.append(EnteredBlock(place, outputs))
            # Fresh ones: what a block returned as it came in would belong to two blocks.
            made = outputs.fakes(self._fakes)
            self._entered[at].enter(SeenEntry(taken, self._origins.returned(at, tree_flatten(made)[0])), *costs)
            return made

    def _run(
        self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[object, tuple[int, int]]:
        """What the block returns, as fakes or, where it has no fake kernel, as zeros; its FLOPs, and what it saves."""
        with _left_as_it_was(self._model.get_submodule(name)), _not_compiled():
            counter = FlopCounterMode(display=False)
            try:
                with counter, self._saving as saved, self._fakes, _without_log_of_fakes():
                    returned = forward(*args, **kwargs)
            except Exception:  # noqa: BLE001  a kernel may raise anything where it is given a fake
                # Some kernels do not know fakes, and blocks may read values of their own: zeros are values. They would
                # meet fakes where the run that failed has left some in a cache.
                check_handed(name, tree_flatten((args, kwargs))[0])
                counter = FlopCounterMode(display=False)
                with counter, self._saving as saved:
                    zero_args, zero_kwargs = _zeros((args, kwargs))
                    returned = forward(*zero_args, **zero_kwargs)
            saved.ran((args, kwargs), returned)
        return returned, (counter.get_total_flops(), saved.nbytes)


def trace(model: nn.Module, blocks: Sequence[str], forward: Callable[[], object]) -> TracedModel:
    """Trace one call of `forward`, which is to run the model on one micro-batch. Raises ConfigError."""
    tracing = TracingPass(model, blocks)
    try:
        tracing.begin()
        forward()
        return tracing.finish()
    finally:
        tracing.abandon()


@contextlib.contextmanager
def _without_log_of_fakes() -> Iterator[None]:
    """Keep torch's traceback of a missing fake kernel off the screen: the block runs on zeros then."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _not_compiled() -> contextlib.AbstractContextManager[object]:
    """A compiled block runs as it was written: in what was compiled no operation is seen."""
    # Who has compiled anything has imported this already; who has not need not wait for it.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Give the generators and the module's buffers their values back: this run counts for nothing."""
    before = [
        (each, name, buffer, buffer.clone())
        for each in module.modules()
        for name, buffer in each.named_buffers(recurse=False)
    ]
    with torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for each, name, buffer, value in before:
            # The object too: an assignment on fakes leaves a fake there.
            each._buffers[name] = buffer
            buffer.copy_(value)


def _zeros(arguments: Any) -> Any:
    leaves, tree = tree_flatten(arguments)

    def real(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not is_fake(leaf):
            return leaf
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)

    return tree_unflatten([real(leaf) for leaf in leaves], tree)
