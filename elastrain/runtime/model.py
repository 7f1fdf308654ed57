"""The user's model as flat buffers: parameters moved into them, gradients that land in slots, blocks that report.

Here torch modules meet the fixed cutting of `elastrain.layout`. No messages, no steps, no optimizer arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b

import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.layout import STATISTICS, Layout, Shard
from elastrain.runtime import statistics
from elastrain.runtime.completion import Completion, OnBlockDone
from elastrain.runtime.describe import Registration, parameter_at, registrations_of
from elastrain.snapshot.digest import combine, digest

Allocate = Callable[[int, torch.dtype], Tensor]
"""`(numel, dtype)` -> a zeroed 1-D tensor, in shared memory where peers read it."""


def allocated(allocate: Allocate, numel: int, dtype: torch.dtype) -> Tensor:
    """As `allocate`, which has no memory to give for nothing: a frozen shard's gradient, parameters of 0 elements."""
    return allocate(numel, dtype) if numel else torch.empty(0, dtype=dtype)


def _in_private_memory(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype)


class _Buffers:
    """Flats, given as index -> (elements, name of the dtype), as slices of one allocation per dtype."""

    def __init__(self, flats: Mapping[int, tuple[int, str]], allocate: Allocate) -> None:
        self.whole: dict[str, Tensor] = {}
        self.flats: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in flats.values()):
            same = {index: numel for index, (numel, its) in flats.items() if its == dtype}
            buffer = self.whole[dtype] = allocated(allocate, sum(same.values()), getattr(torch, dtype))
            self.flats.update(zip(same, torch.split(buffer, list(same.values())), strict=True))


class GradientSlot:
    """One copy of all gradients, and which leaves got one since it was zeroed. Made by `ModelState.new_slot`.

    Gradients of half precision are summed in float32: each micro-batch's is converted before it is added.
    """

    def __init__(self, layout: Layout, allocate: Allocate) -> None:
        self._layout = layout
        folded = {flat.index: (flat.folded_numel, flat.master_dtype) for flat in layout.flats if flat.folded}
        self._buffers = _Buffers(folded, allocate)
        self.touched: set[int] = set()
        """Indices of the leaves into which a backward has accumulated."""
        self.last: int | None = None
        """The last one of them."""
        self.views: dict[int, Tensor] = {
            leaf.index: _view(self._buffers.flats[leaf.flat], leaf.start, layout.parameters[leaf.parameter].shape)
            for leaf in layout.leaves
            if layout.flats[leaf.flat].trained
        }
        self.statistics: dict[int, Tensor] = {
            leaf.index: self._buffers.flats[leaf.flat][2 * leaf.start : 2 * (leaf.start + leaf.numel)]
            for leaf in layout.leaves
            if layout.flats[leaf.flat].group == STATISTICS
        }
        """What the run does to each running statistic: see `elastrain.runtime.statistics`."""
        self.zero()

    def zero(self) -> None:
        """Before the first micro-batch of a run."""
        for buffer in self._buffers.whole.values():
            buffer.zero_()
        for flat in self._layout.flats:
            if flat.group == STATISTICS:
                statistics.clear(self._buffers.flats[flat.index])
        self.touched.clear()

    def lane(self, shard: Shard, lane: int) -> Tensor:
        """1-D `(shard.numel,)`: the shard's range in the gradient of its lane, a view. Twice as long for statistics."""
        flat = self._layout.flats[shard.lanes[lane].flat]
        width = flat.folded_numel // flat.numel if flat.numel else 1
        return self._buffers.flats[flat.index][width * shard.start : width * shard.stop]

    def block_flats(self, block: int) -> list[Tensor]:
        """The block's whole gradients, 1-D views."""
        return [self._buffers.flats[f.index] for f in self._layout.flats if f.block == block and f.trained]

    def digests(self) -> tuple[int, ...]:
        """Per block, over all that a backward has left in it and which leaves it touched. A NaN is a NaN."""
        return tuple(self.digest(block) for block in range(len(self._layout.blocks)))

    def digest(self, block: int) -> int:
        """As `digests`, of one block."""
        touched = (leaf.index for leaf in self._layout.leaves_of(block) if leaf.index in self.touched)
        flats = (self._buffers.flats[f.index] for f in self._layout.flats if f.block == block and f.folded)
        return combine((*touched, *(digest(_one_nan(flat)) for flat in flats)))

    def add(self, later: GradientSlot, block: int) -> None:
        """Add a later run's part in one block, in place."""
        for flat in self._layout.flats:
            if flat.block == block and flat.folded:
                mine, theirs = self._buffers.flats[flat.index], later._buffers.flats[flat.index]
                if flat.group == STATISTICS:
                    statistics.compose(mine, theirs, out=mine)
                else:
                    mine.add_(theirs)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.whole.values())


def _one_nan(flat: Tensor) -> Tensor:
    """With the same bits for every NaN: which of them arithmetic gives is nobody's promise."""
    isnan = flat.isnan()
    return flat.masked_fill(isnan, math.nan) if bool(isnan.any()) else flat


def _view(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    return flat[start : start + numel].view(shape)


class ModelState:
    """Parameters of a model in flat buffers, with the hooks that tell when a block's gradients are final.

    Values, names and forward of the model do not change. A weight tied over two blocks becomes two nn.Parameters over
    the same memory, so that each block has a gradient leaf of its own.
    """

    def __init__(self, model: nn.Module, layout: Layout, allocate: Allocate) -> None:
        self.layout = layout
        self._allocate = allocate
        own = {flat.index: (flat.numel, flat.dtype) for flat in layout.flats if flat.alias_of is None}
        self._buffers = _Buffers(own, allocate)
        self._leaves: dict[int, nn.Parameter] = {}
        self._adopt(model)
        self._moved = [(leaf, p, p.data_ptr()) for leaf, p in self._leaves.items() if p.numel()]
        self._slot: GradientSlot | None = None
        self.statistics = statistics.RunningStatistics(model, layout, self.flat)
        self._completion = Completion(layout)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(leaf))  # type: ignore[no-untyped-call]
            for leaf, parameter in self._leaves.items()
        ]

    @torch.no_grad()
    def _adopt(self, model: nn.Module) -> None:
        """Move every parameter into its flat and split ties."""
        layout = self.layout
        places = registrations_of(model, layout.blocks)
        for leaf in layout.leaves:
            flat = layout.flats[leaf.flat]
            if flat.group == STATISTICS:
                continue
            block = layout.blocks[leaf.block]
            parameter = parameter_at(places[leaf.parameter][0])
            if flat.alias_of is not None:
                parameter = self._split(places[leaf.parameter], block)
            else:
                view = _view(self._buffers.flats[flat.index], leaf.start, tuple(parameter.shape))
                view.copy_(parameter)
                parameter.data = view
            if flat.trained:
                parameter.grad_dtype = getattr(torch, flat.master_dtype)
                self._leaves[leaf.index] = parameter

    @staticmethod
    def _split(places: list[Registration], block: str) -> nn.Parameter:
        """A second parameter over the same memory for the places in `block`."""
        original = parameter_at(places[0])
        alias = nn.Parameter(original.data)
        alias.__dict__.update(original.__dict__)
        for place in places:
            if place.block == block:
                setattr(place.module, place.attribute, alias)
        return alias

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(buffer.nbytes for buffer in self._buffers.whole.values())

    @property
    def memory(self) -> dict[str, Tensor]:
        """Name of a dtype -> the tensor of which the parameters of that dtype are slices."""
        return self._buffers.whole

    @property
    def has_masters(self) -> bool:
        """Whether some parameters have less precision than what the optimizer works on."""
        return any(shard.master_dtype != shard.dtype for shard in self.layout.shards)

    def flat(self, index: int) -> Tensor:
        """1-D parameters of a flat that is no alias."""
        return self._buffers.flats[index]

    def parameters_of(self, shard: Shard) -> Tensor:
        """1-D `(shard.numel,)` view of the parameters that the model computes with."""
        return self._buffers.flats[shard.flat][shard.start : shard.stop]

    def new_slot(self) -> GradientSlot:
        """A zeroed copy of all gradients, one allocation per dtype."""
        return GradientSlot(self.layout, self._allocate)

    def private_slot(self) -> GradientSlot:
        """One that no other member can read, and that is gone when it is let go."""
        return GradientSlot(self.layout, _in_private_memory)

    def attach(self, slot: GradientSlot) -> None:
        """From now on backward accumulates into `slot`: call it before each backward, whatever user code did to .grad.

        Raises ConfigError when a parameter's memory was replaced since the model was prepared.
        """
        for leaf, parameter, address in self._moved:
            if parameter.data_ptr() != address:
                raise ConfigError(
                    f"the memory of parameter {self._name(leaf)!r} was replaced after prepare "
                    "(.to(), .half(), load_state_dict(assign=True)): do that before prepare"
                )
        views = slot.views
        for leaf, parameter in self._leaves.items():
            parameter.grad = views[leaf]
        self._slot = slot

    def detach(self) -> None:
        """Outside of backward the leaves have no .grad, so that zero_grad() or step() of user code can do no harm."""
        for parameter in self._leaves.values():
            parameter.grad = None
        self._slot = None

    @property
    def landed(self) -> Tensor | None:
        """The gradient that the backward under way has come to last; None outside of one."""
        slot = self._slot
        return None if slot is None or slot.last is None else slot.views[slot.last]

    def arm(self, on_block_done: OnBlockDone, blocks: Collection[int] | None = None) -> None:
        """Before the last backward of a run: report each block once, as soon as its gradients are final.

        `blocks`: those that the backward goes through; None: all.
        """
        self._completion.arm(on_block_done, blocks)

    def finish(self) -> None:
        """After that backward: report the blocks that are left, in block order."""
        self._completion.finish(self._attached().touched)

    def disarm(self) -> None:
        """After a backward that failed: nothing more is reported."""
        self._completion.disarm()

    def parameters_digest(self) -> str:
        """16 hexadecimal digits over the parameters' names, order, shapes and bits. Waits for the device."""
        hasher = blake2b(self.layout.digest().encode(), digest_size=8)
        for index in self._buffers.flats:
            hasher.update(digest(self._buffers.flats[index]).to_bytes(8, "little"))
        return hasher.hexdigest()

    def close(self) -> None:
        """Take the hooks off; the parameters stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self.statistics.close()
        self.detach()

    def _hook(self, leaf: int) -> Callable[[Tensor], None]:
        def landed(parameter: Tensor) -> None:
            slot = self._slot
            if slot is None:
                return  # a backward of the user's own, outside of a step
            if parameter.grad is not slot.views[leaf]:
                raise ConfigError(
                    f"the gradient of parameter {self._name(leaf)!r} did not land in its buffer: "
                    "do not assign .grad, call zero_grad() or use create_graph=True during backward"
                )
            slot.touched.add(leaf)
            slot.last = leaf
            self._completion.landed(leaf, slot.touched)

        return landed

    def _attached(self) -> GradientSlot:
        if self._slot is None:
            raise RuntimeError("no gradient slot is attached: call attach() before backward")
        return self._slot

    def _name(self, leaf: int) -> str:
        return self.layout.parameters[self.layout.leaves[leaf].parameter].name
