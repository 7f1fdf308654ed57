"""The user's model in flat buffers: it moves parameters into flats, gradients into slots, and reports finished blocks.

Applies the fixed partition of `elastrain.job.layout` to torch modules. No messages, no steps, no optimizer arithmetic.
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
from elastrain.pipeline.stubs.naming import module_of, plain_name
from elastrain.pipeline.stubs.placeholders import AbsentParameter, absent
from elastrain.runtime.model import statistics
from elastrain.runtime.model.flats import (
    Allocate,
    Completion,
    Copy,
    HeldBlocks,
    OnBlockDone,
    ParameterMemory,
    copy_plainly,
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
    """The script's own setting, which is restored after the loop."""
    leaves: set[int]
    """The parameter's leaf in its first block, and those in its later blocks."""
    name: str


class ModelState:
    """Parameters of a model in flat buffers, with hooks that report when a block's gradients are final.

    Values, names and forward of the model do not change. A weight that two blocks share has a gradient leaf for each;
    `ties` separates the two gradients. If the script has hooks on it, the first block's leaf gets all of its gradient.
    """

    def __init__(self, model: nn.Module, layout: Layout, allocate: Allocate, *, apart: bool = False) -> None:
        """Move the parameters into flats. `apart`: each block has its own memory, so that `hold` can remove it."""
        self.layout = layout
        self.readers = readers_of(model, layout)
        self.gradients = GradientMemory(layout, allocate, apart=apart)
        self._memory = ParameterMemory(layout, allocate, apart=apart)
        self.blocks = HeldBlocks(layout, self.readers, self._memory)
        self.blocks.mark = self._guard
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
            self._hooks += [self._guarded(model, name) for name in {"", *layout.blocks}]
            giving = model.register_state_dict_post_hook(OriginalsHook(self._give_whole))  # type: ignore[no-untyped-call]
            self._hooks.append(giving)

    @torch.no_grad()
    def _adopt(self, model: nn.Module) -> None:
        """Move every parameter into its flat, and register each later use of a tied one."""
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
                self.ties.uses[leaf.index] = LaterUse(module_of(model, block), its, flat.alias_of, land)
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
        """Keep exactly the parameters that these blocks read. Only for models whose blocks lie apart.

        New parameters are NaN until they are written. Removed ones become one NaN, expanded to their shape. Any thread
        may call it while nothing computes with a removed block.
        """
        here, before = self.blocks.flats_of(blocks), set(self._memory.flats)
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
        self._guard()
        self.gradients.hold(blocks)

    def has(self, shard: Shard) -> bool:
        """Return True if this member has memory for the shard's parameters."""
        return shard.flat in self._memory.flats

    def take_parameters(self, shard: int, parameters: Tensor, copy: Copy = copy_plainly) -> None:
        """Write a shard's parameters into the memory that the model computes with."""
        copy(parameters, self.parameters_of(self.layout.shards[shard]))
        coming = self.blocks.coming()
        self.blocks.came(shard)
        if coming != self.blocks.coming():
            self._guard()

    def _guard(self, here: Collection[int] | None = None) -> None:
        """Refuse uses of all parameters except those in the flats `here`. None: those whose values have come."""
        with self.blocks.marking(here) as flats:
            for placed in self._placed:
                AbsentParameter.mark(placed.parameter, None if placed.flat in flats else placed.name)

    def _guarded(self, model: nn.Module, name: str) -> RemovableHandle:
        """Let the whole model fetch its state while parameters are absent, and refuse state and copies of a block."""

        def check(of: nn.Module, prefix: str, keep_vars: bool) -> None:
            if keep_vars or self.blocks.lent is not None:  # with keep_vars the runtime itself reads buffers
                return
            if of is model and not prefix and self.blocks.fetch is not None and self.blocks.missing() is not None:
                self.blocks.lent = self.blocks.fetch()
                self._guard(range(len(self.layout.flats)))
            else:
                self.blocks.check_are_all("state_dict()")

        guard = OriginalsHook(check, copying=partial(self.blocks.check_are_all, "a copy of the model"))
        return module_of(model, name).register_state_dict_pre_hook(guard)  # type: ignore[no-any-return, no-untyped-call]

    def _give_whole(self, of: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object) -> None:
        """Put the values of absent parameters into a `state_dict` of the whole model."""
        if self.blocks.lent is not None:
            lent, self.blocks.lent = self.blocks.lent, None
            self._guard()
            state.update((name, lent[plain_name(name)]) for name in state if plain_name(name) in lent)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters that this member has."""
        return sum(buffer.nbytes for buffer in self._memory.whole.values())

    @property
    def memory(self) -> dict[str, Tensor]:
        """The tensors of which parameters are slices, by name, without those that still wait for their values.

        A tensor is the same object until its parameters are removed.
        """
        # Read in this order, because the engine's thread marks values as awaited before it makes memory for them.
        there = self._memory.whole
        coming = {flat_name(flat) for flat in self.blocks.coming()}
        return {name: whole for name, whole in there.items() if name not in coming}

    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Return, per shard, the block of each of its lanes.

        A frozen shard has empty lanes: one for its block or, if blocks lie apart, one for each block that reads it.
        """
        apart = self.gradients.apart
        frozen = [self.readers[shard.flat] if apart else (shard.block,) for shard in self.layout.shards]
        return tuple(
            tuple(lane.block for lane in shard.lanes) or readers
            for shard, readers in zip(self.layout.shards, frozen, strict=True)
        )

    def parameters_of(self, shard: Shard) -> Tensor:
        """Return a 1-D view `(shard.numel,)` of the model's own parameters. Raises KeyError if they are absent."""
        return self._memory.flats[shard.flat][shard.start : shard.stop]

    def parameters_digest(self) -> str:
        """Return 16 hexadecimal digits over the parameters' names, order, shapes and bits. Waits for the device.

        Raises ConfigError if a block is absent.
        """
        self.blocks.check_are_all("the digest of the model")
        hasher = blake2b(self.layout.digest().encode(), digest_size=8)
        for flat in self._memory.flats.values():
            hasher.update(digest(flat).to_bytes(8, "little"))
        return hasher.hexdigest()

    def new_slot(self) -> GradientSlot:
        """Return a new slot for all gradients, one allocation per dtype, or an empty slot if blocks lie apart."""
        return GradientSlot(self.gradients)

    def attach(self, slot: GradientSlot, *, is_discarding: bool = False) -> None:
        """Make backward accumulate into `slot`. Call it before each backward, because user code may change .grad.

        Args:
            slot: Slot that gets the gradients.
            is_discarding: Drop the gradients as they arrive. Multiplying them by 0 would keep NaN.

        Raises ConfigError if a parameter's memory was replaced since `prepare`, and for hooks on a tied weight of a
        pipeline.
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
                # Without a .grad, autograd passes on the gradient that it made, and the hook puts it into the slot.
                is_added_to = leaf in slot.touched and not is_discarding and not self.ties.are_told_apart(parameter)
                parameter.grad = views[leaf] if is_added_to else None
        self._slot, slot.is_discarding = slot, is_discarding

    def detach(self) -> None:
        """Take .grad off the leaves outside of backward, so that the user's zero_grad() or step() does no harm."""
        for parameter in self._leaves.values():
            parameter.grad = None
        self._slot = None

    @property
    def landed(self) -> Tensor | None:
        """The gradient that the running backward produced last, or None outside of a backward."""
        slot = self._slot
        return None if slot is None or slot.last is None else slot.views[slot.last]

    def arm(self, on_block_done: OnBlockDone, blocks: Collection[int] | None = None) -> None:
        """Report each block once, as soon as its gradients are final. Call it before the last backward of a run.

        `blocks`: the blocks that the backward goes through, or None for all.
        """

        def done(block: int, touched: frozenset[int]) -> None:
            self._attached().settle(block)
            on_block_done(block, touched)

        self._completion.arm(done, blocks)

    def finish(self) -> None:
        """Report the remaining blocks in block order, after the backward for which `arm` was called."""
        self._completion.finish(self._attached().touched)

    def disarm(self) -> None:
        """Stop reporting, for example after a backward that failed."""
        self._completion.disarm()

    def close(self) -> None:
        """Remove all hooks from the model. The parameters stay in the flats."""
        for hook in self._hooks:
            hook.remove()
        self.ties.close()
        self.statistics.close()
        self.detach()
        for placed in self._placed:
            placed.parameter.grad_dtype = placed.grad_dtype

    def _land(self, leaf: int, weight: Tensor, gradient: Tensor) -> Tensor | None:
        """Take the gradient of one use of a tied weight in a step's backward. Returns the gradient if not taken."""
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
                    return  # without a gradient here, the later blocks have taken all of it
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
