"""Random streams of a forward. Each entry of a block seeds them by (seed, step, micro-batch, block, entry number).

A repeated entry is recognised by the generator's own seed, because activation checkpointing restores the generator
before it recomputes a part. If a block was entered before at the same seed, it draws the same numbers again, regardless
of what came in between. Data loading never draws from these generators.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from elastrain.device import DevicePort, device_of, is_accelerator
from elastrain.job.batch import block_key
from elastrain.offload.original_hooks import OriginalsHook
from elastrain.pipeline.stubs.naming import module_of

BEFORE, AFTER = -1, -2
"""Numbers used instead of a micro-batch, for draws of the loop at the start of a step and after its commit."""
_BACKWARD = ".backward"
"""Key of a backward; no block has this name. A checkpoint that restores a forward's generator brings another seed."""
_TRAINED, _ASIDE, _EVALUATED = range(3)
"""Kinds of entries, which are counted separately. `_EVALUATED` (eval mode with gradients) has the keys of training."""
_STEPS_KEPT = 2
"""Number of steps whose entries are kept. A backward may come after forwards of the next step, but not later."""


@dataclass
class _MicroBatch:
    """The entries of one micro-batch so far."""

    step: int
    number: int
    entries: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(block, kind of entry) -> number of entries by forwards."""
    keys: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """(the generator's seed before an entry, block, kind of entry) -> the key that was set."""
    guesses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(block, kind of entry) -> number of entries that were recomputed without a restored generator."""


class BlockRandomness:
    """Forward pre-hooks on the blocks of a model. They seed the default generators of the CPU and of `device`.

    `checkpoint(…, preserve_rng_state=False)` restores no generator. So call `begin_backward` before a backward if
    another micro-batch came in between. The entries of a block then count as recomputed from the last to the first.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators: list[torch.Generator | DevicePort] = [torch.default_generator]
        if is_accelerator(device):
            self._generators.append(device_of(device))
        self._current = _MicroBatch(0, BEFORE)
        self._begun: dict[tuple[int, int], _MicroBatch] = {}
        self._set: dict[int, _MicroBatch] = {}
        """The micro-batch in which each key was set."""
        self._guessed: int | None = None
        """The last key that a backward set without a restored generator. It does not identify an entry."""
        self._enter = self.enter
        self._model = model
        self._modules = {block: module_of(model, block) for block in blocks if block}
        # The hooks stay on copies of the model, whose entries are counted separately.
        hooks = {name: OriginalsHook(self._hook(name), stays=True) for name in self._modules}
        self._hooks = {name: each.register_forward_pre_hook(hooks[name]) for name, each in self._modules.items()}

    def begin(self, step: int, micro_batch: int) -> None:
        """Seed all generators, Python's and NumPy's too, for draws outside of blocks.

        Call it before the forward of a micro-batch, and for the loop's own draws `BEFORE` and `AFTER` all of them.
        """
        self._begin(_MicroBatch(step, micro_batch))

    def begin_backward(self, step: int, micro_batch: int) -> None:
        """Make blocks draw for this micro-batch again. Call it before a backward that came after other forwards."""
        self._begin(self._begun.get((step, micro_batch)) or _MicroBatch(step, micro_batch))
        self._set_key(self._current, block_key(self._seed, step, micro_batch, _BACKWARD))

    @contextmanager
    def aside(self) -> Iterator[Callable[[int], None]]:
        """Let the body draw from streams of its own. Yields a function that begins one, of a number below `AFTER`.

        The generators are the caller's to restore.
        """
        kept = self._current, dict(self._begun), dict(self._set), self._guessed
        try:
            yield lambda number: self._begin(_MicroBatch(self._current.step, number))
        finally:
            self._current, self._begun, self._set, self._guessed = kept

    def close(self) -> None:
        """Remove the hooks. Hooks on copies of the model have no effect from now on."""
        for hook in self._hooks.values():
            hook.remove()
        self._modules.clear()

    def enter(self, block: str, module: nn.Module | None = None) -> None:
        """Set the stream of an entry, as the block's hook does. `module`: the block, or its copy."""
        own = self._modules.get(block)
        if own is None:
            return
        # A known seed was set here for this micro-batch, or restored by a checkpoint for an earlier one. User code set
        # any other seed in this forward.
        before = torch.default_generator.initial_seed()
        at = self._set.get(before, self._current)
        module = module or own
        if not module.training and AFTER <= at.number < 0:
            return  # an evaluation outside of micro-batches continues the loop's stream
        # A loop may evaluate the model or a copy, for example after a member's first micro-batch. That must not change
        # the draws of other micro-batches, so these entries are counted separately.
        aside = _TRAINED
        if module is not own:
            aside = _ASIDE
        elif not (module.training or self._model.training):
            aside = _EVALUATED if torch.is_grad_enabled() else _ASIDE
        is_again = torch._C._current_graph_task_id() != -1
        key = None
        if before != self._guessed:
            key = at.keys.get((before, block, aside)) or (at.keys.get((before, block, _ASIDE)) if is_again else None)
        if key is None:
            key = self._key(at, block, aside=aside, is_again=is_again)
            self._guessed = key if is_again else None
            if not is_again:
                at.keys[before, block, aside] = key
        self._set_key(at, key)

    def enter_compiled(self, block: str) -> None:
        """Enter a block that is absent or was compiled together with its hooks, and remove its hook."""
        if block in self._hooks:
            self._hooks.pop(block).remove()
        self.enter(block)

    def _hook(self, block: str) -> Any:
        return lambda module, inputs: self._enter(block, module)

    def _begin(self, at: _MicroBatch) -> None:
        if at.step != self._current.step:
            oldest = at.step - _STEPS_KEPT + 1
            self._begun = {key: each for key, each in self._begun.items() if oldest <= each.step <= at.step}
            self._set = {key: each for key, each in self._set.items() if oldest <= each.step <= at.step}
        if self._enter == self.enter and "torch._dynamo" in sys.modules:
            # Else torch would recompile it for each micro-batch.
            self._enter = torch.compiler.disable(self.enter)  # type: ignore[no-untyped-call]  # of torch
        self._current = self._begun[at.step, at.number] = at
        self._guessed = None
        key = block_key(self._seed, at.step, at.number, "")
        self._set_key(at, key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # a model's forward may use the legacy generator

    def _key(self, at: _MicroBatch, block: str, *, aside: int, is_again: bool) -> int:
        """Return the key of a new entry or, if `is_again`, of the entry before the last one that was recomputed."""
        entries = at.entries[block, aside]
        (at.guesses if is_again else at.entries)[block, aside] += 1
        entry = -at.guesses[block, aside] % max(entries, 1) if is_again else entries
        return block_key(self._seed, at.step, at.number, block, entry, aside=aside == _ASIDE)

    def _set_key(self, at: _MicroBatch, key: int) -> None:
        self._set[key] = at
        for generator in self._generators:
            generator.manual_seed(key)
