"""The state of a training loop that newcomers get: hyperparameters, schedulers, registered objects, changes in layers.

It is taken at the start of every step, before the body of the loop runs. Newcomers get it as text (JSON) and bytes,
never as code; see `loop_state_codec`. `stateful` gives every object that `job.register` accepts one interface.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elastrain.device import device_of
from elastrain.errors import ConfigError
from elastrain.job.log_book import LogBook
from elastrain.runtime.broadcast import BROADCASTS
from elastrain.runtime.loop_state.device_reads import DeviceReads
from elastrain.runtime.loop_state.layers import Layers, short
from elastrain.runtime.loop_state.loop_state_codec import Packer, Tree, unpack
from elastrain.runtime.loop_state.schedulers import FirstSettings, check_no_more, schedulers_of
from elastrain.runtime.model.kernels import compute_device


class Stateful(Protocol):
    """An object with a state, such as a scheduler, an average or a counter."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Restore the state in place."""
        ...


class InPlace:
    """A registered value that is changed in place, such as a tensor. The value itself is the state."""

    def __init__(self, thing: Any, put: Callable[[Any], object]) -> None:
        self._thing, self._put = thing, put

    def state_dict(self) -> dict[str, Any]:
        """Return the value, not copied."""
        return {"value": self._thing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Overwrite the value in place."""
        self._put(state["value"])


class OfModule:
    """A module that the script updates itself, with its non-persistent buffers, which its `state_dict` omits."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state and its non-persistent buffers, not copied."""
        return {"state": dict(self._module.state_dict()), "caches": self._caches()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the module's state and its non-persistent buffers."""
        self._module.load_state_dict(state["state"])
        for name, buffer in self._caches().items():
            _fill(buffer, state["caches"][name])

    def _caches(self) -> dict[str, Tensor]:
        return {
            f"{path}.{name}" if path else name: buffer
            for path, module in self._module.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        }


def stateful(name: str, thing: Any) -> Stateful:
    """Return a registered object as a `Stateful`. Raises ConfigError if its state cannot be restored in place."""
    match thing:
        case nn.Module():
            return OfModule(thing)
        case Tensor():
            return InPlace(thing, lambda value: _fill(thing, value))
        case np.ndarray():
            return InPlace(thing, lambda value: np.copyto(thing, value, casting="no"))
        case dict():
            return InPlace(thing, lambda value: _replace(thing, value))
        case list():
            return InPlace(thing, lambda value: thing.__setitem__(slice(None), value))
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return thing  # type: ignore[no-any-return]  # a Protocol, just checked
    raise ConfigError(
        f"job.register({name!r}, …) takes what can be changed in place on a member that joins later: a module, tensor, "
        f"NumPy array, dict or list, or an object with state_dict and load_state_dict; got {type(thing).__name__}"
    )


def check_apart(name: str, thing: Any, model: nn.Module) -> None:
    """Raise ConfigError if a registered object shares parameters with the job's model, which is sent anyway."""
    if isinstance(thing, nn.Module | Tensor):
        theirs = {id(q) for q in (thing.parameters() if isinstance(thing, nn.Module) else [thing])}
        shared = next((path for path, q in model.named_parameters() if id(q) in theirs), None)
        if shared is not None:
            raise ConfigError(
                f"job.register({name!r}, …) got parameter {shared!r} of the model, which the optimizer moves and the "
                "job carries by itself: register a copy, as in copy.deepcopy(model), made before prepare"
            )


def _replace(mine: dict[Any, Any], value: dict[Any, Any]) -> None:
    mine.clear()
    mine.update(value)


@torch.no_grad()
def _fill(mine: Tensor, value: Tensor) -> None:
    if mine.shape != value.shape or mine.dtype != value.dtype:
        raise ConfigError(
            f"a registered tensor is {mine.dtype} of shape {tuple(mine.shape)} here and {value.dtype} of shape "
            f"{tuple(value.shape)} in the job: run the same script on all members"
        )
    mine.copy_(value)


SCHEDULERS = "schedulers"
TENSORS = "tensors of the model"
"""Name of the part with the model's tensors. Parts of registered objects have the names of these."""
_HOW_IT_IS_COMPUTED = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Values of a parameter group that choose an implementation and do not change the result."""
_RATES = frozenset({"base_lrs", "_last_lr"})
"""Values of a scheduler that follow from the learning rates of its groups, which are compared anyway."""
_INNER = "_schedulers"
"""Key of the schedulers inside a scheduler. Each of them has its own part."""


class LoopSnapshot:
    """The state of a loop at the start of a step."""

    def __init__(self, text: str, parts: dict[str, str], packers: dict[str, Packer], logged: int = 0) -> None:
        self.text = text
        """The state for newcomers as JSON text, without the bytes of tensors."""
        self._parts = parts
        self._logged = logged
        """Number of lines that the script has logged."""
        self._packers = packers
        devices = {device for packer in packers.values() for device in packer.devices}
        self._made = [device_of(device).record() for device in devices]
        """Events behind the work that made the tensors of the state."""

    def check(self) -> None:
        """Raise ConfigError, naming the object, if a registered object was changed in place since."""
        for packer in self._packers.values():
            packer.check()

    def payload(self) -> list[Tensor]:
        """Return the bytes of the tensors, for `LoopState.load`. Waits for devices. Raises ConfigError as `check` does.

        A change that a script makes later comes after the copies: the thread that calls this waits for them.
        """
        self.check()
        for event in self._made:
            event.wait()
        return [tensor for _, packer in sorted(self._packers.items()) for tensor in packer.payload()]

    def settings(
        self,
        step: int,
        hyper: list[dict[str, Any]],
        layers: Layers,
        reads: DeviceReads | None = None,
        begun: Mapping[str, str] | None = None,
    ) -> str:
        """Return the JSON text that members compare in every vote: digests, by name, of all that must be equal.

        Args:
            step: Number of the step. It decides which values of registered tensors enter the digests.
            hyper: Hyperparameters by parameter group.
            layers: Changes in the model's layers.
            reads: Other reads of the step, which are fetched, too, so that a device is waited for once.
            begun: Further digests, of what the job has begun from; only in its first step.
        """
        reads = reads or DeviceReads()
        names = dict.fromkeys(name for group in hyper for name in group)
        told = {f"{n} of the optimizer": settings_digest([{n: group.get(n)} for group in hyper]) for n in names}
        registered = {name: packer for name, packer in self._packers.items() if name != TENSORS}
        looks = {name: packer.look(step, reads) for name, packer in registered.items()}
        reads.fetch()
        looked = {name: self._parts[name] + look() for name, look in looks.items()}
        if self._logged:
            looked["numbers of job.log calls"] = str(self._logged)
        self.text = f'{self.text[:-1]},"entered":{json.dumps(hyper)}}}'
        return json.dumps({**told, **layers.told(), **looked, **(begun or {})})


class LoopState:
    """The collector and restorer of a loop's state. It is made when the loop starts, after all schedulers."""

    def __init__(
        self,
        optimizer: Optimizer,
        registered: dict[str, Any],
        model: nn.Module,
        layers: Layers,
        log: LogBook | None = None,
    ) -> None:
        for name, thing in registered.items():
            check_apart(name, thing, model)
        self.counted: frozenset[str] = frozenset()
        """Names of the optimizer's own counters in its groups. The groups lack them before the first step."""
        self.numbers: dict[str, int | float] = {}
        """Numbers that the script's loop keeps by itself; see `loop_numbers`."""
        self.course = FirstSettings()
        self._log = log or LogBook("")
        self._optimizer = optimizer
        self._layers = layers
        self._device = compute_device(model)
        self._parts: dict[str, Stateful] = {name: stateful(name, thing) for name, thing in registered.items()}
        self._parts[TENSORS] = layers
        schedulers = schedulers_of(optimizer)
        self._parts |= {f"scheduler {index}": scheduler for index, scheduler in enumerate(schedulers)}
        self._schedulers = {id(scheduler) for scheduler in schedulers}

    @property
    def has_moved(self) -> bool:
        """True if a scheduler has made steps. Before the loop, its state was loaded then."""
        return any(part.last_epoch > 0 for part in self._parts.values() if isinstance(part, LRScheduler))

    def take(self, hyper: list[dict[str, Any]]) -> LoopSnapshot:
        """Return the present state of the loop. Raises ConfigError, with the place, for values that cannot be sent."""
        check_no_more(self._optimizer, self._schedulers)
        packers = {name: Packer() for name in self._parts}
        trees = {name: packers[name].pack(name, dict(part.state_dict())) for name, part in self._parts.items()}
        told = {"hyper": hyper, "layers": self._layers.changes, "untold": sorted(self._layers.untold), "parts": trees}
        told["bulk"] = sorted(name for name, packer in packers.items() if packer.size_bytes)
        # Beside the parts, because members do not compare what they log: a time differs between them.
        told |= {"course": self.course.first, "numbers": self.numbers, "log": self._log.state()}
        text = json.dumps(told, separators=(",", ":"))
        digests = {name: short(json.dumps(tree)) for name, tree in trees.items()}
        return LoopSnapshot(text, digests, packers, self._log.count)

    def describe(self, hyper: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the settings that the script made before the loop. They must be equal on all members and on resume."""
        found = {
            f"{name} of parameter group {index}": value
            for index, group in enumerate(hyper)
            for name, value in group.items()
            if name not in _HOW_IT_IS_COMPUTED
        }
        schedulers = {name: part for name, part in self._parts.items() if _drives(name)}
        settings = {
            f"{key} of {name}": value
            for name, scheduler in schedulers.items()
            for key, value in _settings(scheduler.state_dict()).items()
        }
        return found | {SCHEDULERS: [type(part).__qualname__ for part in schedulers.values()]} | settings

    def load(self, text: str, payload: Sequence[Tensor] = (), changed: Collection[str] = ()) -> None:
        """Restore a loop's state. `changed`: names from `describe` whose values stay as this script has set them.

        If the initial learning rate of a scheduler is changed, the current rate is scaled in proportion. Raises
        ConfigError if this script has other schedulers or registered objects than the state.
        """
        state = json.loads(text)
        for name in {TENSORS, BROADCASTS} & self._parts.keys():  # checkpoints of version 0.1.0 lack them
            state["parts"].setdefault(name, {"dict": []})
        if SCHEDULERS in changed:  # schedulers start afresh
            state["parts"] = {name: tree for name, tree in state["parts"].items() if not _drives(name)}
        mine = {name: part for name, part in self._parts.items() if SCHEDULERS not in changed or not _drives(name)}
        if set(state["parts"]) != set(mine):
            raise ConfigError(
                f"this member has {sorted(self._parts)}, the job has {sorted(state['parts'])}: "
                "all members must run the same script"
            )
        first = [group.get("initial_lr") for group in self._optimizer.param_groups]
        for index, (group, values) in enumerate(zip(self._optimizer.param_groups, state["hyper"], strict=True)):
            kept = {name for name in group if f"{name} of parameter group {index}" in changed} | {"fused"}
            group.update({n: _grouped(value) for n, value in values.items() if n in {*group, *self.counted} - kept})
            if "initial_lr" in kept and values.get("initial_lr") and SCHEDULERS not in changed:
                group["lr"] = values["lr"] * group["initial_lr"] / values["initial_lr"]
        self._layers.load(state["layers"], state.get("untold", ()))
        self.course.first = state.get("course", [])
        self.numbers = state.get("numbers", {})
        if "log" in state:  # checkpoints of version 0.1.0 lack it
            self._log.load(state["log"])
        bulk = dict(zip(state["bulk"], payload, strict=True))
        for name, part in mine.items():
            own = dict(part.state_dict())
            stays = {key: value for key, value in own.items() if f"{key} of {name}" in changed}
            # The tensors of a module are overwritten in place: it would need twice their memory to place them first.
            device = None if isinstance(part, OfModule) else self._device
            came = _unpacked(name, state["parts"][name], bulk.get(name), own, device)
            part.load_state_dict({**own, **came, **stays})
            if isinstance(part, LRScheduler) and any("initial_lr" in each for each in changed):
                part.base_lrs = [lr for lr in first if lr is not None]


def _drives(name: str) -> bool:
    """Return True if this is the name of a scheduler's part."""
    return name.startswith("scheduler ")


def _settings(state: dict[str, Any]) -> dict[str, Any]:
    """Return a scheduler's own values in the plain form of a checkpoint's spec.

    Before a scheduler's first step all its values are settings.
    """
    found = {}
    for key, value in state.items():
        tree = Packer().pack(key, value)
        is_plain = tree is None or isinstance(tree, str | int) or (isinstance(tree, float) and math.isfinite(tree))
        if key not in _RATES and key != _INNER:
            found[key] = tree if is_plain else json.dumps(tree, sort_keys=True)
    return found


def _unpacked(
    name: str, tree: Tree, bulk: Tensor | None, own: dict[str, Any], device: torch.device | None
) -> dict[str, Any]:
    try:
        found: dict[str, Any] = unpack(tree, bulk, own, device)
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from None
    return found


def settings_digest(hyper: list[dict[str, Any]]) -> str:
    """Return a short digest of the hyperparameters of a step. Members compare it at every commit."""
    return short(json.dumps(hyper, sort_keys=True))


def _grouped(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
