"""The module `torch.late`: what torch and programs ask a device for, with the names that `torch.cuda` has."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.late import graphs, randomness
from tests.support.late import private_names as private
from tests.support.late.faults import faults
from tests.support.late.hooks import Guard
from tests.support.late.memory import LOCK, MEMORY, NAME
from tests.support.late.order import DEFAULT, Event, Stream, current_stream, reap, set_stream, submit, synchronize
from tests.support.late.settings import settings


class Device:
    """The context of the only device: nothing changes in it."""

    def __init__(self, device: object = None) -> None:
        index = device.index if isinstance(device, torch.device) else device
        if index not in (None, 0, NAME, f"{NAME}:0"):
            raise RuntimeError(f"LATE error: invalid device ordinal {index}; there is one device, late:0")

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None: ...


def stream(stream: Stream | None) -> Any:
    return Device() if stream is None else stream


def memory_allocated(device: object = None) -> int:
    with LOCK:
        reap()
        return MEMORY.live_bytes


def max_memory_allocated(device: object = None) -> int:
    return MEMORY.peak_bytes


def reset_peak_memory_stats(device: object = None) -> None:
    MEMORY.peak_bytes = memory_allocated()


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return the free bytes and all bytes."""
    return settings.capacity_bytes - memory_allocated(), settings.capacity_bytes


def memory_stats(device: object = None) -> dict[str, int]:
    now, peak = memory_allocated(), max_memory_allocated()
    return {
        f"{kind}_bytes.all.{name}": value
        for kind in ("allocated", "reserved")
        for name, value in (("current", now), ("peak", peak))
    }


def get_device_properties(device: object = None) -> SimpleNamespace:
    major, minor = settings.capability
    return SimpleNamespace(
        name=settings.name,
        uuid=settings.uuid,
        total_memory=settings.capacity_bytes,
        multi_processor_count=settings.multiprocessors,
        major=major,
        minor=minor,
    )


def _sleep(cycles: int) -> None:
    """Keep the current stream busy, as `torch.cuda._sleep` does. No clock runs here: a long time never ends."""
    if cycles >= 1 << 40:
        with LOCK:
            submit("sleep", [], [])
            current_stream().hang = faults.hang


def _set_device(device: object) -> None:
    Device(device)


FUNCTIONS: dict[str, Any] = {
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "_initialized": True,  # checkpoints of activations ask for it
    "is_initialized": lambda: faults.operations > 0,
    "is_available": lambda: True,
    "_is_in_bad_fork": lambda: faults.forked,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _set_device,
    "device": Device,
    "Stream": Stream,
    "Event": Event,
    "stream": stream,
    "current_stream": current_stream,
    "default_stream": lambda device=None: DEFAULT,
    "set_stream": set_stream,
    "synchronize": synchronize,
    "_sleep": _sleep,
    "CUDAGraph": graphs.Graph,
    "graph": graphs.capture,
    "make_graphed_callables": graphs.make_graphed_callables,
    "is_current_stream_capturing": graphs.is_capturing,
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "memory_stats": memory_stats,
    "mem_get_info": mem_get_info,
    "empty_cache": lambda: None,
    "get_device_name": lambda device=None: settings.name,
    "get_device_capability": lambda device=None: settings.capability,
    "get_device_properties": get_device_properties,
    "is_bf16_supported": lambda: True,
    "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    "manual_seed": randomness.manual_seed,
    "manual_seed_all": randomness.manual_seed,
    "initial_seed": randomness.initial_seed,
    "get_rng_state": randomness.get_rng_state,
    "set_rng_state": randomness.set_rng_state,
    "get_rng_state_all": lambda: [randomness.get_rng_state()],
    "set_rng_state_all": lambda states: randomness.set_rng_state(states[0]),
    "default_generators": (randomness.GENERATOR,),
}
OF_ACCELERATOR = {
    "synchronize": synchronize,
    "current_stream": current_stream,
    "set_stream": set_stream,
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "memory_stats": memory_stats,
    "empty_cache": lambda: None,
}
"""Functions of `torch.accelerator` that reach a device through C++ only, and that a device in Python cannot answer."""


class Hooks(private.HooksBase):  # type: ignore[misc]
    """Answers that torch's C++ asks for."""

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True


def set_up() -> None:
    """Make torch know the device; `torch.late` is there from then on."""
    module = types.ModuleType(f"torch.{NAME}", __doc__)
    vars(module).update(FUNCTIONS)
    private.set_up_backend(NAME, backend_module=module, hook=Hooks(), device_guard=Guard())
    sys.modules[module.__name__] = module
    for name, function in OF_ACCELERATOR.items():
        if not hasattr(torch.accelerator, name):
            raise RuntimeError(f"torch {torch.__version__} has no torch.accelerator.{name}")
        setattr(torch.accelerator, name, function)
