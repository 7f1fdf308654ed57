"""Random streams of a forward, set on entering a block: of (seed, step, micro-batch, block, number of the entry).

What an entry repeats is read back from the generator's own seed. Activation checkpointing restores the generator before
it computes a part again: where a block follows a seed that it has followed before, it draws the same numbers again,
whatever came in between. Data loading never draws from these generators.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from elastrain.job.batch import block_key
from elastrain.offload.original_hooks import OriginalsHook

BEFORE, AFTER = -1, -2
"""In place of a micro-batch: what the training loop draws at the start of a step, and once it is committed."""
_BACKWARD = ".backward"
"""No block has this name: where a checkpoint puts a forward's state back, the generator tells of another seed."""
_TRAINED, _ASIDE, _EVALUATED = range(3)
"""Kinds of entries, which are counted apart. A model in `eval()` that takes gradients has the keys of the training."""
_STEPS_KEPT = 2
"""A backward may come after forwards of the next step; nothing older is ever computed again."""


@dataclass
class _MicroBatch:
    """The entries of one micro-batch so far."""

    step: int
    number: int
    entries: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(block, what it is counted among) -> how often the forward has entered it."""
    keys: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """(the generator's seed before an entry, block, what it is counted among) -> the key that was set."""
    guesses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(block, what it is counted among) -> how many of them were computed again without a restored generator."""


class BlockRandomness:
    """Forward pre-hooks on the blocks of a model that seed the default generators of the CPU and of `device`.

    `checkpoint(…, preserve_rng_state=False)` restores nothing: call `begin_backward` before a backward, if another
    micro-batch came in between. The entries of a block are then taken to be computed again from the last to the first.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._current = _MicroBatch(0, BEFORE)
        self._begun: dict[tuple[int, int], _MicroBatch] = {}
        self._set: dict[int, _MicroBatch] = {}
        """By key."""
        self._guessed: int | None = None
        """The key that was set last without a restored generator, in a backward: no entry is known by it."""
        self._enter = self.enter
        self._model = model
        self._modules = {block: model.get_submodule(block) for block in blocks if block}
        # Copies of the model have streams of their own.
        hooks = {name: OriginalsHook(self._hook(name), stays=True) for name in self._modules}
        self._hooks = {name: each.register_forward_pre_hook(hooks[name]) for name, each in self._modules.items()}

    def begin(self, step: int, micro_batch: int) -> None:
        """Before the forward of a micro-batch, or of what the loop does `BEFORE` and `AFTER` all of them.

        Also seeds everything outside of blocks, Python's and NumPy's too.
        """
        self._begin(_MicroBatch(step, micro_batch))

    def begin_backward(self, step: int, micro_batch: int) -> None:
        """Before the backward of a micro-batch that others have followed: blocks draw for it again."""
        self._begin(self._begun.get((step, micro_batch)) or _MicroBatch(step, micro_batch))
        self._set_key(self._current, block_key(self._seed, step, micro_batch, _BACKWARD))

    def close(self) -> None:
        """Take the hooks off. Those of copies of the model do nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._modules.clear()

    def enter(self, block: str, module: nn.Module | None = None) -> None:
        """Set the stream of an entry, as the block's hook does. `module`: the block, or its copy."""
        own = self._modules.get(block)
        if own is None:
            return
        # The generator was last seeded by us for this micro-batch, or restored by a checkpoint for an earlier one;
        # a seed that is not ours was set by user code in this forward.
        before = self._generators[0].initial_seed()
        at = self._set.get(before, self._current)
        module = module or own
        if not module.training and at.number < 0:
            return  # an evaluation between micro-batches goes on with the loop's stream
        # Loops evaluate a model, or a copy of it, behind the first micro-batch that a member computes, say: that must
        # not change what is drawn for others, so these entries are counted apart.
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
        """Enter a block that was compiled together with its hooks, or is absent, in place of its hook."""
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
            # It would be compiled anew for each micro-batch.
            self._enter = torch.compiler.disable(self.enter)  # type: ignore[no-untyped-call]  # of torch
        self._current = self._begun[at.step, at.number] = at
        self._guessed = None
        key = block_key(self._seed, at.step, at.number, "")
        self._set_key(at, key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # a model's forward may use the legacy generator

    def _key(self, at: _MicroBatch, block: str, *, aside: int, is_again: bool) -> int:
        """Return the key of a new entry or, if `is_again`, of the one before the last that was computed again."""
        entries = at.entries[block, aside]
        (at.guesses if is_again else at.entries)[block, aside] += 1
        entry = -at.guesses[block, aside] % max(entries, 1) if is_again else entries
        return block_key(self._seed, at.step, at.number, block, entry, aside=aside == _ASIDE)

    def _set_key(self, at: _MicroBatch, key: int) -> None:
        self._set[key] = at
        for generator in self._generators:
            generator.manual_seed(key)
