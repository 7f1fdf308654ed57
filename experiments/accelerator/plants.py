"""Bugs that are planted in the product's code: in workers, a part of a function's source is replaced."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A bug, and a job in which it has to be found."""

    where: str
    """`module:function` or `module:Class.method`."""
    old: str
    new: str
    model: str = "gpt"
    members: int = 3
    stages: int = 1
    steps: int = 6
    trouble: str = ""
    """Faults that happen to a member besides; see `train._Troubles`."""
    slowness: float = 1.0
    shared: bool = False
    """True: members read each other's device memory in place."""
    refused: str = ""
    """Words with which the job without the bug is refused."""


_PORT = "elastrain.device.accelerators:Accelerator."
_CARRYING = "elastrain.runtime.carrying."
_MEMORY, _LANDING, _LOSSES = (
    _CARRYING + each for each in ("tensor_memory:TensorMemory.", "landed_results:Landing.", "run_losses:RunLosses.")
)
_BOUNDARIES, _ON_HOST = "elastrain.runtime.loop.boundary_tensors:", "elastrain.snapshot.states_on_host:StatesOnHost."
_CHANNEL = "elastrain.runtime.io.loop_channel:LoopChannel."
_WAITS = "after.wait()"
PLANTS = {
    # Waits that are removed.
    "copies out do not wait for what they copy": Plant(where=_PORT + "copy_out", old=_WAITS, new="pass"),
    "copies in do not wait for those who read": Plant(where=_PORT + "copy_in", old=_WAITS, new="pass"),
    "the engine does not wait for results": Plant(where=_CHANNEL + "take", old="told.event.wait()", new="pass"),
    "the loop does not wait for parameters": Plant(where=_CHANNEL + "wait", old="submitted.wait()", new="pass"),
    # Reports that come too early.
    "a partial is sent before its copy has landed": Plant(
        where=_MEMORY + "carried", old="event.synchronize()", new="pass"
    ),
    "results are told before they have landed": Plant(
        where=_LANDING + "then",
        old="event.then(lambda error: self._landed(call, event, error))",
        new="self._landed(call, self._begun, None)",
    ),
    "parameters are told with an earlier mark": Plant(
        where=_CHANNEL + "give", old="self.landing.port.record()", new="self.landing._begun"
    ),
    # Sources and memory that are used again.
    "copies for peers share one buffer": Plant(
        where=_MEMORY + "carried",
        old="source, tensor = tensor, self.outgoing(tensor.numel(), tensor.dtype, in_place=in_place)",
        new="source, key = tensor, f'{tensor.numel()} {tensor.dtype}'; tensor = self.__dict__.get(key); "
        "tensor = self.__dict__.setdefault(key, allocated(self._scratch, source.numel(), source.dtype)) "
        "if tensor is None else tensor",
    ),
    # Uploads that are forgotten.
    "published parameters are not copied in": Plant(
        where="elastrain.runtime.model.flat_model:ModelState.take_parameters",
        old="copy(parameters, self.parameters_of(self.layout.shards[shard]))",
        new="self.parameters_of(self.layout.shards[shard])",
    ),
    "a received state is not copied in": Plant(
        where=_MEMORY + "taken_in", old="self.copy(tensor, made)", new="pass", trouble="killed"
    ),
    "other members' partials are not copied in": Plant(
        where="elastrain.buffers.folds:Folds.keep", old="self._arithmetic.copy(incoming, tensor)", new="pass"
    ),
    # Streams and random numbers.
    "gradients are added up on another stream": Plant(
        where="elastrain.runtime.model.gradients:GradientSlot.land",
        old="torch.add(gradient, 0.0, out=view)",
        new="late = torch.get_device_module(view.device)\n"
        "        with late.stream(late.Stream()):\n            torch.add(gradient, 0.0, out=view)",
    ),
    "events are recorded in the default stream": Plant(
        where=_PORT + "_record",
        old="event.record(self.current_stream())",
        new="event.record(self._module.default_stream())",
    ),
    "the device's work does not wait for a copy in": Plant(
        where=_MEMORY + "copy",
        old="landed = copy(source, out)",
        new="copy(source, out); return",
    ),
    "the device's generator is not seeded": Plant(
        where=_PORT + "manual_seed", old="generators[self.device.index].manual_seed(seed)", new="pass"
    ),
    "memory is freed while it is copied out": Plant(
        where=_PORT + "copy_out",
        old="after = after or self.record()\n",
        new="source = source.clone(); after = self.record()\n"
        "    self = __import__('copy').copy(self); self.record_stream = id\n",
    ),
    "losses share one place": Plant(
        where=_LOSSES + "_copied",
        old="self._port.empty_pinned((), value.dtype)",
        new="self.__dict__.setdefault('place', self._port.empty_pinned((), value.dtype))",
        model="token_weights",
    ),
    "an earlier step's copy is sent again": Plant(
        where="elastrain.runtime.engine.sender:Sender._payload_of",
        old="if key not in self._carried:",
        new="key = next((at for at in self._carried if type(at[2]) is type(message)), key)\n"
        "    if key not in self._carried:",
    ),
    # Device memory that peers read in place.
    "peers are told of device memory before its copy has landed": Plant(
        where=_MEMORY + "carried", old="event.synchronize()", new="pass", shared=True
    ),
    "a peer's device memory is given back before it is read": Plant(
        where=_MEMORY + "copy", old="landed.synchronize()", new="pass", shared=True
    ),
    "a peer's device memory is computed with where it lies": Plant(
        where=_MEMORY + "is_far", old="or self._is_foreign(tensor)", new="", shared=True
    ),
    "boundary tensors in device memory are announced before they have landed": Plant(
        where=_LANDING + "_behind",
        old="for event in (computed, *after):",
        new="for event in (computed,):",
        stages=3,
        shared=True,
    ),
    # What watches the device.
    "the agent does not watch the device of a member that waits": Plant(
        where="elastrain.runtime.io.device_heartbeat:DeviceHeartbeat.watch",
        old="if port.is_host:",
        new="if True:",
        trouble="stream hangs",
        steps=10,
    ),
    "times of launching are taken for the device's": Plant(
        where="elastrain.runtime.io.micro_batch_timer:MicroBatchTimer._landed",
        old="began.elapsed_s(ended)",
        new="1e-3",
        slowness=1000.0,
    ),
    # Pipelines, and states in host memory.
    "draws on the device are seen by no check": Plant(
        where="elastrain.pipeline.stubs.generators:Generators.__init__",
        old='if device.type != "cpu":',
        new="if False:",
        model="noisy",
        stages=3,
        refused="drew random numbers of torch",
    ),
    "boundary tensors are announced before they have landed": Plant(
        where=_LANDING + "_behind", old="for event in (computed, *after):", new="for event in (computed,):", stages=3
    ),
    "boundary tensors are used before they have landed": Plant(
        where=_BOUNDARIES + "_copied_in", old="copied.wait()", new="pass", stages=3
    ),
    "a backup's state is kept before it has landed": Plant(
        where=_ON_HOST + "write", old="event.synchronize()", new="pass", trouble="killed"
    ),
    "a backup's state is used before it has landed": Plant(
        where=_ON_HOST + "read", old="landed[-1].synchronize()", new="pass"
    ),
}


def plant(name: str, folder: Path) -> None:
    """Put a bug into this process."""
    if name:
        function, code = changed_code(PLANTS[name])
        function.__code__ = code
        (folder / "planted").touch()


def changed_code(bug: Plant) -> tuple[FunctionType, CodeType]:
    """Return the function, and its code with the bug. Raises ValueError if its source has no such place."""
    module_name, _, path = bug.where.partition(":")
    module = importlib.import_module(module_name)
    found: Any = module
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(bug.old) != 1:
        raise ValueError(f"{bug.where} has {source.count(bug.old)} places with {bug.old!r}; a planted bug needs one")
    definition = source[source.index("def ") :].replace(bug.old, bug.new)  # without decorators
    namespace = dict(vars(module))
    exec(f"from __future__ import annotations\n{definition}", namespace)
    return function, namespace[function.__name__].__code__
