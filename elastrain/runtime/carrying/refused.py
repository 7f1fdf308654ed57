"""Refusals of jobs on a device, by name and before anything has changed: memory limits, compiled models, graphs."""

from __future__ import annotations

from torch import nn

from elastrain.device.port import DevicePort
from elastrain.errors import ConfigError


def check(port: DevicePort, model: nn.Module, *, has_limit: bool) -> None:
    """Raise ConfigError for a memory limit or a compiled model in a job on a device.

    Args:
        port: Device of the model.
        model: Model that is prepared.
        has_limit: Whether the job has a memory limit, with drives or without.
    """
    if port.is_host:
        return
    if has_limit:
        raise ConfigError(
            f"a memory limit counts the host's memory, and the model is on {port.device}, of which this version "
            "moves nothing to drives: leave --memory-limit, memory_limit= and --offload-dir out"
        )
    for name, module in model.named_modules():
        # By name, because an import of torch's compiler costs a second.
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"module {name!r} of the model" if name else "the model"
            raise ConfigError(
                f"{what} is compiled, and this version trains compiled models on the CPU only: leave torch.compile out "
                f"for {port.device}"
            )


def check_not_captured(port: DevicePort) -> None:
    """Raise ConfigError while a graph of the device's work is captured, because its replays call no hooks."""
    if port.is_capturing():
        raise ConfigError(
            f"step.backward() was called while a graph of {port.device} is captured, and a replay of it would report "
            "no gradients: capture the blocks of the model by themselves, without the backward"
        )
