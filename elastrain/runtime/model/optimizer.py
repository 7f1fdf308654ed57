"""The sharded optimizer: steps pieces of parameters with the class, the hyperparameters and the bits of torch.optim.

The user's optimizer object stays what schedulers drive; an inner one of the same class does the arithmetic. Decides
nothing about who owns what, and sends nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastrain.errors import ConfigError
from elastrain.job.layout import ALIGN, Layout, Piece, Shard, master_dtype
from elastrain.job.values import Record
from elastrain.runtime.model.device_updates import DeviceUpdates
from elastrain.runtime.model.trial import of_all, try_out
from elastrain.snapshot.shard_state import ShardState

Hyper = list[dict[str, Any]]
"""Hyperparameters of each parameter group, as plain JSON values."""
Item = tuple[ShardState, Tensor, Container[int] | None]
"""A shard's state, its finished gradient (1-D, never written), and the parameters that got one (None: all)."""

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
_ADAMS = frozenset({"Adam", "AdamW"})
"""Classes with equal state per parameter: each can go on from the state of the other."""
_ATTRIBUTES = (bool, int, float, str, type(None), tuple)
_NOT_HYPER = {"params", "param_names"}


class PieceOptimizer:
    """An optimizer that applies finished gradients to shard states, in place.

    The groups of the user's `optimizer` go on to hold the hyperparameters.
    `elementwise=True` vouches for a class that is not in torch.optim. Raises ConfigError (see `check`).
    """

    def __init__(self, optimizer: Optimizer, layout: Layout, *, elementwise: bool = False) -> None:
        check(optimizer, elementwise=elementwise)
        self._facade = optimizer
        self._layout = layout
        self._inner = self._same_class(optimizer, [_placeholder(optimizer.param_groups)])
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._device: DeviceUpdates | None = None
        self.counted = frozenset[str]() if type(optimizer) in ELEMENTWISE else self._try_out()
        """Names of the counters that the optimizer itself keeps in its parameter groups."""
        for parameter in [parameter for parameter, state in optimizer.state.items() if not is_stepped(state)]:
            del optimizer.state[parameter]
        self.loaded: Callable[[Shard], list[dict[str, Any]]] | None = None
        """Returns the state that the script has loaded for the pieces of a shard, or None if it has loaded none."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter.device.type != "cpu" for parameter in parameters):
            self._device = DeviceUpdates(layout, partial(self._same_class, optimizer), self._placeholders)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the memory for scaled gradients."""
        return sum(scratch.nbytes for scratch in self._scratch.values())

    def let_go_of_scratch(self) -> None:
        """Free the memory for scaled gradients. The next update allocates it again."""
        self._scratch.clear()

    def _try_out(self) -> frozenset[str]:
        groups = self._facade.param_groups
        dtypes = [_placeholder([group, *groups])["params"][0].dtype for group in groups]
        kinds = [
            (dtype, {min(max(q.ndim, 1), 4) for q in group["params"]} or {1})
            for dtype, group in zip(dtypes, groups, strict=True)
        ]
        make = partial(self._same_class, self._facade)
        return try_out(type(self._facade).__name__, make, [_grouped(each) for each in self.hyperparameters()], kinds)

    def committed(self, record: Record) -> None:
        """Advance the counters in the user's parameter groups, as a step of the optimizer itself would.

        What the script has loaded is forgotten, because all states exist now.
        """
        self.loaded = None
        if self.counted and not record.skipped:
            groups, made = self._facade.param_groups, self._same_class(self._facade, self._placeholders())
            for parameter in (q for group in made.param_groups for q in group["params"]):
                parameter.grad = torch.zeros_like(parameter)
            made.step()
            for mine, its in zip(groups, made.param_groups, strict=True):
                mine.update({name: its[name] for name in self.counted if name in its})

    def hyperparameters(self) -> Hyper:
        """Return the current values of the groups, as schedulers left them. Raises ConfigError if one is not plain.

        Waits for the device once for each value that is a tensor there, such as a learning rate.
        """
        return self._hyper(self._device is None or self._device.is_fused)

    def _hyper(self, may_be_fused: bool) -> Hyper:
        groups = [_plain_group(group) for group in self._facade.param_groups]
        return [_fused_if_possible(type(self._facade), group) for group in groups] if may_be_fused else groups

    def _placeholders(self, may_be_fused: bool = True) -> list[dict[str, Any]]:
        """Return the groups with their current values, and placeholders as parameters."""
        groups = self._facade.param_groups
        values = [_grouped(each) for each in self._hyper(may_be_fused)]
        return [{**v, **_placeholder([g, *groups])} for g, v in zip(groups, values, strict=True)]

    def create(self, shard: Shard, parameters: Tensor) -> ShardState:
        """Return the state before the first step over `parameters` (1-D, `shard.numel`, master dtype; not copied)."""
        pieces = self._layout.pieces[shard.index]
        hyper = self.hyperparameters()
        views = _views(parameters, pieces)
        states = []
        for piece, view in zip(pieces, views, strict=True):
            made = self._same_class(self._facade, [{"params": [view], **_grouped(hyper[piece.group])}])
            states.append(dict(made.state[view]) if view in made.state else {})
        if self.loaded is not None:
            states = [loaded or new for loaded, new in zip(self.loaded(shard), states, strict=True)]
        return ShardState(shard=shard.index, parameters=parameters, pieces=states)

    def take_over(self, state: ShardState, wrote: str) -> ShardState:
        """Return a stored state for this optimizer, and start missing parts afresh.

        `wrote`: class that wrote the state, or "" if unknown. The state of a class that is not compatible is dropped.
        """
        of_same, name = state.pieces, type(self._facade).__name__
        if wrote not in ("", name) and not {wrote, name} <= _ADAMS:
            of_same = [{} for _ in state.pieces]
        made = self.create(self._layout.shards[state.shard], state.parameters).pieces
        return replace(state, pieces=[its or new for its, new in zip(of_same, made, strict=True)])

    @torch.no_grad()
    def apply(self, items: Sequence[Item], *, hyper: Hyper, factors: tuple[float, ...] = ()) -> None:
        """Take one optimizer step over all items: multiply gradients by each factor in turn, then update.

        Pieces of untouched parameters stay as they are. No reference to the gradients is kept. `version` of the states
        does not change. Gradients in host memory are copied to the device of their states.
        """
        if self._device is None:
            self._apply(items, hyper, factors)
            return
        for part in self._device.parts([gradient.numel() for _, gradient, _ in items]):
            self._apply(items[part], hyper, factors)
        self.let_go_of_scratch()  # forward and backward need the memory

    def _apply(self, items: Sequence[Item], hyper: Hyper, factors: tuple[float, ...]) -> None:
        scaled = self._scaled(items, factors)
        groups: dict[tuple[int, bool], list[Tensor]] = {}
        stepped: list[tuple[ShardState, int, Tensor]] = []
        for (state, _, touched), gradient in zip(items, scaled, strict=True):
            pieces = self._layout.pieces[state.shard]
            for index, (piece, view) in enumerate(zip(pieces, _views(state.parameters, pieces), strict=True)):
                if touched is not None and piece.parameter not in touched:
                    continue
                view.grad = gradient[piece.start : piece.stop]
                self._inner.state[view] = state.pieces[index]
                # Fused SGD treats a call as the first step of all its tensors or of none: fresh pieces go separately.
                groups.setdefault((piece.group, not state.pieces[index]), []).append(view)
                stepped.append((state, index, view))
        if self._device is not None:
            self._device.copy_scalars_in(stepped)
        self._step(groups, hyper)
        for state, index, view in stepped:
            state.pieces[index] = self._inner.state[view]
        self._inner.state.clear()
        self._inner.param_groups = []
        self._facade._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn

    def _step(self, groups: dict[tuple[int, bool], list[Tensor]], hyper: Hyper) -> None:
        self._inner.param_groups = [
            {"params": views, **_grouped(hyper[group])}
            for (group, _), views in sorted(groups.items(), key=lambda g: g[0])
        ]
        self._inner.step()

    def _scaled(self, items: Sequence[Item], factors: tuple[float, ...]) -> list[Tensor]:
        """Return copies of the gradients, times the factors one after another, in memory that is used again."""
        scaled = []
        for (_, gradient, _), scratch in zip(items, self._scratch_for(items), strict=True):
            if gradient.device != scratch.device:
                scratch.copy_(gradient)
                gradient = scratch
            if factors:
                torch.mul(gradient, factors[0], out=scratch)
            elif gradient is not scratch:
                scratch.copy_(gradient)
            for factor in factors[1:]:
                scratch.mul_(factor)
            scaled.append(scratch)
        return scaled

    def _scratch_for(self, items: Sequence[Item]) -> list[Tensor]:
        needed: dict[tuple[torch.dtype, torch.device], int] = {}
        places = []
        for state, gradient, _ in items:
            key = (gradient.dtype, state.parameters.device)
            start = needed.get(key, 0)
            needed[key] = start + gradient.numel()
            places.append((key, start, needed[key]))
        for key, numel in needed.items():
            if key not in self._scratch or self._scratch[key].numel() < numel:
                self._scratch[key] = torch.empty(numel, dtype=key[0], device=key[1])
        return [self._scratch[key][start:stop] for key, start, stop in places]

    def _same_class(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
        """Return a new optimizer of the same class. Its constructor gets the values in `defaults`."""
        cls: Any = type(optimizer)
        accepted = inspect.signature(cls).parameters
        given = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        try:
            made = cls(groups, **given)
        except Exception as error:  # whatever a class of the script's may raise
            raise ConfigError(
                f"{cls.__name__} could not be made again from its defaults ({error}): its constructor must take "
                "parameters (not so a wrapper of another optimizer), and its arguments must be in `defaults` under "
                "their names"
            ) from error
        assert isinstance(made, Optimizer)
        if cls not in ELEMENTWISE:  # its constructor may have kept other values than the defaults
            plain = {
                n: value for n, value in vars(optimizer).items() if n not in of_all() and type(value) in _ATTRIBUTES
            }
            made.__dict__.update(plain)
        return made


def check(optimizer: Optimizer, *, elementwise: bool = False) -> None:
    """Raise ConfigError unless the update of each element depends on that element alone."""
    cls, name = type(optimizer), type(optimizer).__name__
    if cls is torch.optim.LBFGS:
        raise ConfigError("LBFGS needs a closure and the whole gradient: use an elementwise optimizer such as AdamW")
    if cls is torch.optim.SparseAdam:
        raise ConfigError("SparseAdam takes sparse gradients, which are not supported: use Adam")
    if cls not in ELEMENTWISE and not elementwise:
        known = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise ConfigError(
            f"{name} is not known to update each element by itself, and parameters are cut: use one of {known}, "
            "or vouch for it with elementwise=True"
        )
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"optimizer.step of this {name} was replaced, and the sharded optimizer would not call it: leave the "
            "replacement out, or make it a class of its own and vouch for it with elementwise=True"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{name}(differentiable=True) is not supported: leave it out")


def _placeholder(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return parameters of zeros, with dtype and device of the first of these groups that has parameters."""
    parameter = next(parameter for group in groups for parameter in group["params"])
    dtype = getattr(torch, master_dtype(str(parameter.dtype).removeprefix("torch.")))
    return {"params": [torch.zeros(ALIGN, dtype=dtype, device=parameter.device)]}


def _views(parameters: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    return [parameters[piece.start : piece.stop] for piece in pieces]


def _plain_group(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(name, value) for name, value in group.items() if name not in _NOT_HYPER}


def _plain(name: str, value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return float(value)
        case tuple() | list():
            return [_plain(name, element) for element in value]
    raise ConfigError(f"hyperparameter {name!r} must be a number, a word or a list of them; got {type(value).__name__}")


def _fused_if_possible(cls: type[Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    chosen = group.get("foreach") is not None or group.get("fused") is not None or group.get("capturable")
    return group if cls not in _FUSED or chosen else {**group, "fused": True}


def _grouped(hyper: dict[str, Any]) -> dict[str, Any]:
    """Return a group's values as torch.optim keeps them, with tuples instead of lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in hyper.items()}


def is_stepped(state: dict[str, Any]) -> bool:
    """Return True if an optimizer state comes from a step. States that constructors create count zero steps."""
    return bool(state) and float(state.get("step", 1)) > 0
