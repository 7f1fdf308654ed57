"""The user's model as flat buffers: parameters moved into them, gradients that land in slots, blocks that report.

Here torch modules meet the fixed cutting of `elastrain.job.layout`. No messages, no steps, no optimizer arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elastrain.errors import ConfigError
from elastrain.job.layout import STATISTICS, Layout, Shard
from elastrain.offload.original_hooks import OriginalsHook
from elastrain.pipeline.stubs.placeholders import AbsentParameter, absent
from elastrain.runtime.model import statistics
from elastrain.runtime.model.flats import (
    Allocate,
    Completion,
    HeldBlocks,
    OnBlockDone,
    ParameterMemory,
    flat_name,
    in_own_storage,
    view_of,
)
from elastrain.runtime.model.gradients import GradientMemory, GradientSlot
from elastrain.runtime.model.partition import parameter_at, readers_of, registrations_of
from elastrain.runtime.model.ties import LaterUse, Ties
from elastrain.snapshot.digest import digest


@dataclass(frozen=True, kw_only=True, eq=False)
class _Placed:
    """A parameter's place in its flat."""

    flat: int
    start: int
    parameter: nn.Parameter
    grad_dtype: torch.dtype | None
    """The script's own setting, for the time behind the loop."""
    leaves: set[int]
    """The parameter's leaf in its first block, and those in its later blocks."""
    name: str


class ModelState:
    """Parameters of a model in flat buffers, with the hooks that tell when a block's gradients are final.

    Values, names and forward of the model do not change. A weight tied over two blocks has a gradient leaf for each,
    which `ties` tells apart; where the script has hooks on it, all of its gradient goes to the first block's leaf.
    """

    def __init__(self, model: nn.Module, layout: Layout, allocate: Allocate, *, apart: bool = False) -> None:
        """`apart`: blocks come and go (`hold`), so each has memory of its own."""
        self.layout = layout
        self.readers = readers_of(model, layout)
        self.gradients = GradientMemory(layout, allocate, apart=apart)
        self._memory = ParameterMemory(layout, allocate, apart=apart)
        self.blocks = HeldBlocks(layout, self.readers, self._memory)
        self._leaves: dict[int, nn.Parameter] = {}
        self._placed: list[_Placed] = []
        self.ties = Ties(layout, self.readers, apart=apart)
        self._adopt(model)
        self._slot: GradientSlot | None = None
        self.statistics = statistics.RunningStatistics(model, layout, self._memory.flat)
        self._completion = Completion(layout)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(leaf))  # type: ignore[no-untyped-call]
            for leaf, parameter in self._leaves.items()
        ]
        self.ties.forward_is_over()
        if apart:
            self._hooks += [self._guarded(model.get_submodule(name)) for name in {"", *layout.blocks}]

    @torch.no_grad()
    def _adopt(self, model: nn.Module) -> None:
        """Move every parameter into its flat, and tell the uses of tied ones apart."""
        layout, found = self.layout, dict[int, _Placed]()
        places = registrations_of(model, layout.blocks)
        for leaf in layout.leaves:
            flat = layout.flats[leaf.flat]
            if flat.group == STATISTICS:
                continue
            parameter = parameter_at(places[leaf.parameter][0])
            if flat.alias_of is not None:
                block = layout.blocks[leaf.block]
                its = [place for place in places[leaf.parameter] if place.block == block]
                land = partial(self._land, leaf.index, parameter)
                self.ties.uses[leaf.index] = LaterUse(model.get_submodule(block), its, flat.alias_of, land)
                found[leaf.parameter].leaves.add(leaf.index)
                continue
            view = view_of(self._memory.flats[flat.index], leaf.start, tuple(parameter.shape))
            view.copy_(parameter)
            parameter.data = in_own_storage(view)
            found[leaf.parameter] = _Placed(
                flat=flat.index,
                start=leaf.start,
                parameter=parameter,
                grad_dtype=parameter.grad_dtype,
                leaves={leaf.index},
                name=places[leaf.parameter][0].name,
            )
            if flat.trained:
                parameter.grad_dtype = getattr(torch, flat.master_dtype)
                self._leaves[leaf.index] = parameter
        self._placed = list(found.values())

    @torch.no_grad()
    def hold(self, blocks: Collection[int]) -> None:
        """From now on have the parameters that these blocks read, and those alone; where blocks lie apart.

        What comes is NaN until it is written; what goes is one NaN, expanded to its shape. For any thread, while
        nothing computes with a block that goes.
        """
        here = {flat for flat, readers in self.readers.items() if any(block in blocks for block in readers)}
        before = set(self._memory.flats)
        self._guard(here & before - self.blocks.coming())
        with torch._C.DisableTorchFunctionSubclass():
            for placed in self._placed:
                if placed.flat in before - here:
                    placed.parameter.data = absent(placed.parameter)
            self.ties.forget(before - here)
            self.blocks.hold(here)
            for placed in self._placed:
                if placed.flat in here - before:
                    view = view_of(self._memory.flats[placed.flat], placed.start, tuple(placed.parameter.shape))
                    placed.parameter.data = in_own_storage(view)
        self.ties.forget(here - before)
        self._guard(here - self.blocks.coming())
        self.gradients.hold(blocks)

    def has(self, shard: Shard) -> bool:
        """Whether there is memory for the shard's parameters here."""
        return shard.flat in self._memory.flats

    def take_parameters(self, shard: int, parameters: Tensor) -> None:
        """Write what the model computes with."""
        self.parameters_of(self.layout.shards[shard]).copy_(parameters)
        coming = self.blocks.coming()
        self.blocks.came(shard)
        if coming != self.blocks.coming():
            self._guard(self._memory.flats.keys() - self.blocks.coming())

    def _guard(self, here: Collection[int]) -> None:
        """Refuse uses of parameters outside of the flats `here`, whose values are not on this member."""
        for placed in self._placed:
            AbsentParameter.mark(placed.parameter, None if placed.flat in here else placed.name)

    def _guarded(self, module: nn.Module) -> RemovableHandle:
        """Refuse to copy absent parameters or to put them into a state: they are NaN."""

        def check(of: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not keep_vars:  # else the runtime asks, for buffers
                self.blocks.check_are_all("state_dict()")

        guard = OriginalsHook(check, copying=partial(self.blocks.check_are_all, "a copy of the model"))
        return module.register_state_dict_pre_hook(guard)  # type: ignore[no-any-return, no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters that are here."""
        return sum(buffer.nbytes for buffer in self._memory.whole.values())

    @property
    def memory(self) -> dict[str, Tensor]:
        """The tensors of which parameters are slices, by name: as long as it is the same one, nothing came or went.

        Without those whose values are still to come.
        """
        # In this order: the engine's thread says that values are awaited, then makes room for them, then writes them.
        there = self._memory.whole
        coming = {flat_name(flat) for flat in self.blocks.coming()}
        return {name: whole for name, whole in there.items() if name not in coming}

    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Per shard, the block of each of its lanes.

        A frozen one takes part in the fold with nothing: in that of its block or, apart, of all blocks that read it.
        """
        apart = self.gradients.apart
        frozen = [self.readers[shard.flat] if apart else (shard.block,) for shard in self.layout.shards]
        return tuple(
            tuple(lane.block for lane in shard.lanes) or readers
            for shard, readers in zip(self.layout.shards, frozen, strict=True)
        )

    def parameters_of(self, shard: Shard) -> Tensor:
        """1-D `(shard.numel,)` view of the parameters that the model computes with. Raises KeyError for absent ones."""
        return self._memory.flats[shard.flat][shard.start : shard.stop]

    def parameters_digest(self) -> str:
        """16 hexadecimal digits over the parameters' names, order, shapes and bits. Waits for the device.

        Raises ConfigError where a block is absent.
        """
        self.blocks.check_are_all("the digest of the model")
        hasher = blake2b(self.layout.digest().encode(), digest_size=8)
        for flat in self._memory.flats.values():
            hasher.update(digest(flat).to_bytes(8, "little"))
        return hasher.hexdigest()

    def new_slot(self) -> GradientSlot:
        """A copy of all gradients, one allocation per dtype; an empty one where blocks lie apart."""
        return GradientSlot(self.gradients)

    def attach(self, slot: GradientSlot, *, is_discarding: bool = False) -> None:
        """From now on backward accumulates into `slot`: call it before each backward, whatever user code did to .grad.

        is_discarding: this backward counts for nothing: its gradients are dropped as they come. To multiply them by 0
            would keep those that are NaN.

        Raises ConfigError when a parameter's memory was replaced since the model was prepared, and for hooks on a tied
        weight of a pipeline.
        """
        self.ties.forward_is_over()
        views = slot.views
        for placed in self._placed:
            flat, parameter = self._memory.flat(placed.flat), placed.parameter
            if flat is None or not parameter.numel() or not views.keys() & placed.leaves:
                continue
            if parameter.data_ptr() != flat.data_ptr() + placed.start * flat.element_size():
                raise ConfigError(
                    f"the memory of parameter {self._name(min(placed.leaves))!r} was replaced after prepare "
                    "(.to(), .half(), load_state_dict(assign=True)): do that before prepare"
                )
        for leaf, parameter in self._leaves.items():
            if leaf in views:
                # Where there is none yet autograd hands over what it has made, and the hook puts it into the slot.
                is_added_to = leaf in slot.touched and not is_discarding and not self.ties.are_told_apart(parameter)
                parameter.grad = views[leaf] if is_added_to else None
        self._slot, slot.is_discarding = slot, is_discarding

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

        def done(block: int, touched: frozenset[int]) -> None:
            self._attached().settle(block)
            on_block_done(block, touched)

        self._completion.arm(done, blocks)

    def finish(self) -> None:
        """After that backward: report the blocks that are left, in block order."""
        self._completion.finish(self._attached().touched)

    def disarm(self) -> None:
        """After a backward that failed: nothing more is reported."""
        self._completion.disarm()

    def close(self) -> None:
        """Take everything off the model; the parameters stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self.ties.close()
        self.statistics.close()
        self.detach()
        for placed in self._placed:
            placed.parameter.grad_dtype = placed.grad_dtype

    def _land(self, leaf: int, weight: Tensor, gradient: Tensor) -> Tensor | None:
        """Take the gradient of a tied weight's later use, in a step's backward; None: it was taken."""
        slot = self._slot
        if slot is None or gradient.requires_grad or not self.ties.are_told_apart(weight):
            return gradient
        if leaf not in slot.views:
            self._completion.refuse(leaf)
        if not slot.is_discarding:
            slot.put(leaf, gradient)
        self._completion.landed(leaf, slot.touched)
        return None

    def _hook(self, leaf: int) -> Callable[[Tensor], None]:
        def landed(parameter: Tensor) -> None:
            slot = self._slot
            if slot is None:
                return  # a backward of the user's own, outside of a step
            if self.ties.are_told_apart(parameter):
                gradient, parameter.grad = parameter.grad, None
                if gradient is None or self._land(leaf, parameter, gradient) is None:
                    return  # without one, later blocks have taken all that there was
            if leaf not in slot.views:
                self._completion.refuse(leaf)
            if slot.is_discarding:
                parameter.grad = None
            elif not slot.take(leaf, parameter):
                raise ConfigError(
                    f"the gradient of parameter {self._name(leaf)!r} did not land in its buffer: "
                    "do not assign .grad, call zero_grad() or use create_graph=True during backward"
                )
            self._completion.landed(leaf, slot.touched)

        return landed

    def _attached(self) -> GradientSlot:
        if self._slot is None:
            raise RuntimeError("no gradient slot is attached: call attach() before backward")
        return self._slot

    def _name(self, leaf: int) -> str:
        return self.layout.parameters[self.layout.leaves[leaf].parameter].name
