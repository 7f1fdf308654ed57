"""The devices of this process, by torch's names for them."""

from __future__ import annotations

import functools

import torch

from elastrain.device.accelerators import Accelerator
from elastrain.device.port import DevicePort
from elastrain.device.same_memory import HOST

_MADE: dict[tuple[str, int], Accelerator] = {}
_NEEDED = ("Event", "Stream", "current_stream", "stream")


def device_of(device: torch.device) -> DevicePort:
    """Return the port to a device. Without an index, it is the current device of its type.

    Raises ValueError for a device without memory or streams, such as `meta`.
    """
    if device.type == "cpu":
        return HOST
    if not is_accelerator(device):
        raise ValueError(f"tensors of the CPU and of accelerators with streams are supported; got one on {device}")
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    port = _MADE.get((device.type, index))
    if port is None:
        made = Accelerator(torch.device(device.type, index), module)
        port = _MADE.setdefault((device.type, index), made)  # another thread may have made it in the meantime
    return port


def is_accelerator(device: torch.device) -> bool:
    """Return True for a device with streams and memory of its own."""
    return device.type != "cpu" and _has_streams(device.type)


@functools.cache
def _has_streams(device_type: str) -> bool:
    module = getattr(torch, device_type, None)
    return all(hasattr(module, name) for name in _NEEDED)


def current_device() -> DevicePort:
    """Return the port to the current accelerator of this process, or to the host if there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.get_device_module(accelerator).is_available():
        return HOST
    return device_of(accelerator)


def device_count() -> int:
    """Return the number of accelerators that this process sees. CUDA is not started for that, if NVML answers."""
    accelerator = torch.accelerator.current_accelerator()
    return 0 if accelerator is None else int(torch.get_device_module(accelerator).device_count())
