"""Refusals of jobs on a device, by name: devices without float64, misplaced graphs."""

from __future__ import annotations

import torch
from torch import nn

from elastrain.device.port import DevicePort
from elastrain.errors import ConfigError


def check(port: DevicePort, model: nn.Module) -> None:
    """Raise ConfigError for what a job on a device cannot have: no float64, or stale graphs.

    Args:
        port: Device of the model.
        model: Model that is prepared.
    """
    if port.is_host:
        return
    try:
        torch.linalg.vector_norm(port.empty(1, torch.float32), dtype=torch.float64)
    except (RuntimeError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        raise ConfigError(
            f"{port.device} does not compute in float64 ({error}), in which norms of gradients and running statistics "
            "are added up: train on another device or on the CPU"
        ) from error
    for name, module in model.named_modules():
        if _is_captured(module):
            what = f"module {name!r} of the model" if name else "the model"
            raise ConfigError(
                f"{what} was captured in a graph before prepare, which moves the parameters that its replays read: "
                "capture it after prepare"
            )


def _is_captured(module: nn.Module) -> bool:
    """Return True if `make_graphed_callables` has replaced the module's forward."""
    forward = vars(module).get("forward")
    return "make_graphed_" in getattr(forward, "__qualname__", "")


def check_not_captured(port: DevicePort) -> None:
    """Raise ConfigError while a graph of the device's work is captured, because its replays call no hooks."""
    if port.is_capturing():
        raise ConfigError(
            f"step.backward() was called while a graph of {port.device} is captured, and a replay of it would report "
            "no gradients: capture the blocks of the model by themselves, without the backward"
        )
