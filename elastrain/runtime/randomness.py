"""Random streams of a forward: set on entering a block, from (seed, step, micro-batch, block).

The micro-batch for which a block draws is read back from the generator's own seed. Activation checkpointing restores
the generator before it computes a part again, so the key belongs to the graph, whatever came in between. Data loading
never draws from these generators.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from elastrain.keys import block_key

BEFORE, AFTER = -1, -2
"""In place of a micro-batch: what the training loop draws at the start of a step, and once it is committed."""
_BACKWARD = ".backward"
"""No block has this name: where a checkpoint puts a forward's state back, the generator tells of another seed."""
_STEPS_KEPT = 2
"""A backward may come after forwards of the next step; nothing older is ever computed again."""


class BlockRandomness:
    """Forward pre-hooks on the blocks of a model that seed the default generators of the CPU and of `device`.

    `checkpoint(…, preserve_rng_state=False)` restores nothing: call `begin_backward` before a backward, if another
    micro-batch came in between.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._current = (0, BEFORE)
        self._entered: frozenset[str] = frozenset()
        """Blocks that were entered since, without being in training."""
        self._origins: dict[int, tuple[int, int]] = {}
        self._modules = {block: model.get_submodule(block) for block in blocks if block}
        self._hooks = [each.register_forward_pre_hook(self._entering(block)) for block, each in self._modules.items()]

    def begin(self, step: int, micro_batch: int) -> None:
        """Before the forward of a micro-batch, or of what the loop does `BEFORE` and `AFTER` all of them.

        Also seeds everything outside of blocks, Python's and NumPy's too.
        """
        if step != self._current[0]:
            oldest = step - _STEPS_KEPT + 1
            self._origins = {key: origin for key, origin in self._origins.items() if oldest <= origin[0] <= step}
        self._current = (step, micro_batch)
        self._entered = frozenset()
        key = self._seed_block(self._current, "")
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # a model's forward may use the legacy generator

    def begin_backward(self, step: int, micro_batch: int) -> None:
        """Before the backward of a micro-batch that others have followed: blocks draw for it again."""
        self.begin(step, micro_batch)
        self._seed_block(self._current, _BACKWARD)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def enter(self, block: str) -> None:
        """What its hook does."""
        if not self._modules[block].training and not self._is_computed_for_training(block):
            return  # an evaluation that samples must not draw the same numbers at every call
        # The generator was last seeded by us for this micro-batch, or restored by a checkpoint for an earlier one;
        # a seed that is not ours was set by user code in this forward.
        origin = self._origins.get(self._generators[0].initial_seed(), self._current)
        self._seed_block(origin, block)

    def _is_computed_for_training(self, block: str) -> bool:
        """Whether a block that is evaluated seems to be a part of the model that is trained, such as a frozen one."""
        is_again = torch._C._current_graph_task_id() != -1
        is_first, self._entered = block not in self._entered, self._entered | {block}
        return is_again or (is_first and self._current[1] >= 0)

    def _entering(self, block: str) -> Any:
        return lambda module, inputs: self.enter(block)

    def _seed_block(self, origin: tuple[int, int], block: str) -> int:
        key = block_key(self._seed, *origin, block)
        self._origins[key] = origin
        for generator in self._generators:
            generator.manual_seed(key)
        return key
