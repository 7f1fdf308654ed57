"""The user's model as flat buffers: parameters moved into them, gradients that land in slots, blocks that report.

Here torch modules meet the fixed cutting of `elastrain.layout`. No messages, no steps, no optimizer arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.layout import FROZEN, Flat, Layout, ParameterSpec, Shard, cut
from elastrain.snapshot.digest import digest

Allocate = Callable[[int, torch.dtype], Tensor]
"""`(numel, dtype)` -> a zeroed 1-D tensor, in shared memory where peers read it."""
OnBlockDone = Callable[[int, frozenset[int]], None]
"""`(block, leaves of it that got a gradient in this run)`: the block's gradients in the slot are final."""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class _Registration:
    """One place where a parameter hangs: `setattr(module, attribute, …)` replaces it."""

    module: nn.Module
    attribute: str
    name: str
    block: str


def default_blocks(model: nn.Module) -> tuple[str, ...]:
    """The model's children that own parameters, containers replaced by their children, in the model's order.

    Parameters outside of them form the block `""`, which then comes first.
    """
    return _completed(model, tuple(_owners(model, "")))


def _owners(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _owners(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}"


def _completed(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """The given names checked, and `""` in front when some parameter lies outside of them."""
    known = dict(model.named_modules())
    unknown = [name for name in blocks if name not in known]
    if unknown or len(set(blocks)) != len(blocks):
        raise ConfigError(
            f"blocks must be names of different submodules; got {unknown or list(blocks)}: see named_modules()"
        )
    used = {registration.block for registrations in _registrations(model, blocks) for registration in registrations}
    empty = [name for name in blocks if name not in used]
    if empty:
        raise ConfigError(f"these blocks own no parameter: {empty}; leave them out")
    return ("", *blocks) if "" in used and "" not in blocks else blocks


def _registrations(model: nn.Module, blocks: Iterable[str]) -> list[list[_Registration]]:
    """Per distinct parameter, in the model's order, every place where it is registered."""
    by_length = sorted((name for name in blocks if name), key=len, reverse=True)
    places: dict[int, list[_Registration]] = {}
    for path, module in model.named_modules():
        block = next((name for name in by_length if path == name or path.startswith(name + ".")), "")
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            place = _Registration(module=module, attribute=attribute, name=name, block=block)
            places.setdefault(id(parameter), []).append(place)
    return list(places.values())


def _parameter(place: _Registration) -> nn.Parameter:
    parameter = getattr(place.module, place.attribute)
    assert isinstance(parameter, nn.Parameter)
    return parameter


def describe(model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[str] | None = None) -> Layout:
    """Cut the model for this optimizer. `blocks`: submodule names, or None for `default_blocks`.

    Raises ConfigError, with one sentence, for models and optimizers that can not be cut.
    """
    _check_statistics(model)
    names = default_blocks(model) if blocks is None else _completed(model, tuple(blocks))
    groups = _groups(optimizer)
    places = _registrations(model, names)
    _check_optimizer(optimizer, {id(_parameter(p[0])) for p in places}, groups)
    specs, ties = [], {}
    for registrations in places:
        parameter = _parameter(registrations[0])
        home, *others = sorted({place.block for place in registrations}, key=names.index)
        first = next(place for place in registrations if place.block == home)
        _check_parameter(first.name, parameter, trained=id(parameter) in groups)
        ties[first.name] = tuple(others)
        specs.append(
            ParameterSpec(
                name=first.name,
                block=home,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                group=groups.get(id(parameter), FROZEN),
                requires_grad=parameter.requires_grad,
            )
        )
    if not any(spec.trained and spec.numel for spec in specs):
        raise ConfigError(
            "the model has no parameter that requires a gradient and is in the optimizer: nothing to train"
        )
    devices = {str(_parameter(registrations[0]).device) for registrations in places}
    if len(devices) > 1:
        raise ConfigError(f"all parameters must be on one device; got {sorted(devices)}")
    return cut(specs, blocks=names, ties=ties)


def _check_statistics(model: nn.Module) -> None:
    """Running statistics would be those of whoever computed last: refused until they are folded like gradients."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ConfigError(
                f"{type(module).__name__} {name!r} keeps running statistics, which members cannot share yet: "
                "use LayerNorm or GroupNorm, or track_running_stats=False"
            )


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """id(parameter) -> index of its group."""
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _check_optimizer(optimizer: torch.optim.Optimizer, known: set[int], groups: dict[int, int]) -> None:
    if set(groups) - known:
        count = len(set(groups) - known)
        raise ConfigError(
            f"{count} of the optimizer's parameters are not the model's: make the optimizer from this model"
        )
    if any(_stepped(state) for state in optimizer.state.values()):
        raise ConfigError("the optimizer already has state from steps taken elsewhere: pass a new one to prepare")


def _stepped(state: dict[str, Any]) -> bool:
    """Some classes create their state when they are made; such state counts zero steps."""
    return bool(state) and float(state.get("step", 1)) > 0


def _check_parameter(name: str, parameter: nn.Parameter, *, trained: bool) -> None:
    problem = None
    if type(parameter) is not nn.Parameter:
        problem = f"is a {type(parameter).__name__}; tensor subclasses, lazy and distributed parameters can not be cut"
    elif parameter.layout is not torch.strided:
        problem = f"has layout {parameter.layout}; only dense parameters can be cut"
    elif parameter.dtype not in _DTYPES.values():
        problem = f"is {parameter.dtype}; for now parameters are {' or '.join(_DTYPES)}: convert the model first"
    elif parameter.is_meta:
        problem = "has no data (meta device): initialise the model first"
    elif parameter.requires_grad and not trained:
        problem = "requires a gradient but is not in the optimizer: add it, or call requires_grad_(False) on it"
    if problem:
        raise ConfigError(f"parameter {name!r} {problem}")


class _Buffers:
    """The given flats as slices of one allocation per dtype."""

    def __init__(self, flats: Iterable[Flat], allocate: Allocate) -> None:
        flats = list(flats)
        self.whole: dict[str, Tensor] = {}
        self.flats: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(flat.dtype for flat in flats):
            same = [flat for flat in flats if flat.dtype == dtype]
            buffer = self.whole[dtype] = allocate(sum(flat.numel for flat in same), _DTYPES[dtype])
            parts = torch.split(buffer, [flat.numel for flat in same])
            self.flats.update({flat.index: part for flat, part in zip(same, parts, strict=True)})


class GradientSlot:
    """One copy of all gradients, and which leaves got one since it was zeroed. Made by `ModelState.new_slot`."""

    def __init__(self, layout: Layout, allocate: Allocate) -> None:
        self._layout = layout
        self._buffers = _Buffers((flat for flat in layout.flats if flat.trained), allocate)
        self.touched: set[int] = set()
        """Indices of the leaves into which a backward has accumulated."""
        self.views: dict[int, Tensor] = {
            leaf.index: _view(self._buffers.flats[leaf.flat], leaf.start, layout.parameters[leaf.parameter].shape)
            for leaf in layout.leaves
            if leaf.flat in self._buffers.flats
        }

    def zero(self) -> None:
        """Before the first micro-batch of a run."""
        for buffer in self._buffers.whole.values():
            buffer.zero_()
        self.touched.clear()

    def lane(self, shard: Shard, lane: int) -> Tensor:
        """1-D `(shard.numel,)`: the shard's range in the gradient of its lane, a view."""
        return self._buffers.flats[shard.lanes[lane].flat][shard.start : shard.stop]

    def block_flats(self, block: int) -> list[Tensor]:
        """The block's whole gradients, 1-D views: adding two slots block by block adds these."""
        return [self._buffers.flats[f.index] for f in self._layout.flats if f.block == block and f.trained]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.whole.values())


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
        self._buffers = _Buffers((flat for flat in layout.flats if flat.alias_of is None), allocate)
        self._leaves: dict[int, nn.Parameter] = {}
        self._adopt(model)
        self._moved = [(leaf, p, p.data_ptr()) for leaf, p in self._leaves.items() if p.numel()]
        self._slot: GradientSlot | None = None
        self._completion = _Completion(layout)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(leaf))  # type: ignore[no-untyped-call]
            for leaf, parameter in self._leaves.items()
        ]

    @torch.no_grad()
    def _adopt(self, model: nn.Module) -> None:
        """Move every parameter into its flat and split ties."""
        layout = self.layout
        places = _registrations(model, layout.blocks)
        for leaf in layout.leaves:
            flat = layout.flats[leaf.flat]
            block = layout.blocks[leaf.block]
            parameter = _parameter(places[leaf.parameter][0])
            if flat.alias_of is not None:
                parameter = self._split(places[leaf.parameter], block)
            else:
                view = _view(self._buffers.flats[flat.index], leaf.start, tuple(parameter.shape))
                view.copy_(parameter)
                parameter.data = view
            if flat.trained:
                self._leaves[leaf.index] = parameter

    @staticmethod
    def _split(places: list[_Registration], block: str) -> nn.Parameter:
        """A second parameter over the same memory for the places in `block`."""
        original = _parameter(places[0])
        alias = nn.Parameter(original.data)
        alias.__dict__.update(original.__dict__)
        for place in places:
            if place.block == block:
                setattr(place.module, place.attribute, alias)
        return alias

    def flat(self, index: int) -> Tensor:
        """1-D parameters of a flat that is no alias."""
        return self._buffers.flats[index]

    def parameters_of(self, shard: Shard) -> Tensor:
        """1-D `(shard.numel,)` view of the parameters that the model computes with."""
        return self._buffers.flats[shard.flat][shard.start : shard.stop]

    def new_slot(self) -> GradientSlot:
        """A zeroed copy of all gradients, one allocation per dtype."""
        return GradientSlot(self.layout, self._allocate)

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

    def arm(self, on_block_done: OnBlockDone) -> None:
        """Before the last backward of a run: report each block once, as soon as its gradients are final."""
        self._completion.arm(on_block_done)

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
            self._completion.landed(leaf, slot.touched)

        return landed

    def _attached(self) -> GradientSlot:
        if self._slot is None:
            raise RuntimeError("no gradient slot is attached: call attach() before backward")
        return self._slot

    def _name(self, leaf: int) -> str:
        return self.layout.parameters[self.layout.leaves[leaf].parameter].name


class _Completion:
    """Counts the leaves of each block during one backward and reports a block when all have fired.

    A leaf fires once per backward, after its full accumulation, however often it is used; only a reentrant checkpoint
    fires it once per inner backward. The first armed backward therefore only learns which blocks do that, and reports
    all of them at its end; later, those blocks always wait for the end.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._leaves = [frozenset(leaf.index for leaf in layout.leaves_of(b)) for b in range(len(layout.blocks))]
        self._block_of = {leaf: block for block, leaves in enumerate(self._leaves) for leaf in leaves}
        self._learned = False
        self._late: set[int] = set()
        self._report: OnBlockDone | None = None
        self._fired: set[int] = set()
        self._left: list[int] = []
        self._reported: set[int] = set()

    def arm(self, report: OnBlockDone) -> None:
        self._report = report
        self._fired.clear()
        self._reported.clear()
        self._left = [len(leaves) for leaves in self._leaves]

    def disarm(self) -> None:
        self._report = None

    def landed(self, leaf: int, touched: set[int]) -> None:
        if self._report is None:
            return
        block = self._block_of[leaf]
        if block in self._reported:
            raise ConfigError(
                f"block {self._layout.blocks[block]!r} got a gradient after its last one: "
                "it is entered several times under a reentrant checkpoint; use checkpoint(…, use_reentrant=False)"
            )
        if leaf in self._fired:
            self._late.add(block)
            return
        self._fired.add(leaf)
        self._left[block] -= 1
        if not self._left[block] and self._learned and block not in self._late:
            self._done(block, touched)

    def finish(self, touched: set[int]) -> None:
        if self._report is None:
            raise RuntimeError("finish() without arm()")
        for block in range(len(self._leaves)):
            if block not in self._reported:
                self._done(block, touched)
        self._learned = True
        self._report = None

    def _done(self, block: int, touched: set[int]) -> None:
        assert self._report is not None
        self._reported.add(block)
        self._report(block, self._leaves[block] & touched)
