"""Checks of the arguments of `within` and `step`, before anything is changed. Each error is one sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastrain.offload.drives.device import Device
from elastrain.offload.errors import LimitTooSmallError, OffloadConfigError
from elastrain.offload.lifetimes.blocks import ModelBlock
from elastrain.offload.overlaps import WAY_OUT, shared_memory
from elastrain.offload.planning.plan_search import Policy

DEVICES = ("cpu", "cuda")
"""Kinds of devices whose parameters `within` moves."""
ELEMENTWISE = frozenset(
    {"Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"}
)
"""Optimizers of torch that update each element from its own values alone, so they can update block by block."""


def check_model(model: nn.Module) -> None:
    """Raise OffloadConfigError if the model is not a module, or has no parameters that can leave memory."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise OffloadConfigError(
            f"the model must be a torch.nn.Module that Python runs, got {type(model).__name__}: give the module itself"
        )
    devices = set[torch.device]()
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)
        devices.add(parameter.device)
    if not devices:
        raise OffloadConfigError(f"{type(model).__name__} has no parameters: there is nothing to train")
    if len(devices) > 1:
        raise OffloadConfigError(f"all parameters must be on one device: these are on {sorted(map(str, devices))}")
    if shared := shared_memory(model, lambda parameter: parameter.requires_grad):
        raise OffloadConfigError(f"{shared[0]!r} and {shared[1]!r} of the model {WAY_OUT}")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise OffloadConfigError(f"{name} has no size yet: run one forward before, and make the optimizer after it")
    if parameter.is_meta:
        raise OffloadConfigError(f"{name} is on the meta device and has no values: give it some before (to_empty)")
    dense = parameter.layout is torch.strided and torch._debug_has_internal_overlap(parameter) == 0
    if parameter.device.type not in DEVICES or not dense:
        raise OffloadConfigError(
            f"{name} must be a dense tensor in the memory of the CPU or of a CUDA device, and is "
            f"{'not dense' if not dense else f'on {parameter.device}: save_on_disk moves activations of such a device'}"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise OffloadConfigError if the optimizer may not be elementwise, or has parameters of another model."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OffloadConfigError(f"the optimizer must be one of torch.optim, got {name}: give the optimizer itself")
    if name not in ELEMENTWISE or type(optimizer).__module__.split(".")[0] != "torch":
        raise OffloadConfigError(
            f"{name} is not known to update each element by itself: use one of {sorted(ELEMENTWISE)}"
        )
    own = set(model.parameters())
    for group in optimizer.param_groups:
        if any(each not in own for each in group["params"]):
            raise OffloadConfigError(
                "the optimizer has parameters that are not the model's: make it of model.parameters()"
            )


def check_limit(blocks: Sequence[ModelBlock], limit_bytes: int) -> None:
    """Raise LimitTooSmallError if one block with its gradients exceeds the limit. More is known after a step."""
    needs = {each.name: sum(p.nbytes * (1 + p.requires_grad) for p in each.parameters) for each in blocks}
    largest = max(needs, key=lambda name: needs[name])
    if needs[largest] > limit_bytes:
        raise LimitTooSmallError(limit_bytes, needs[largest], f"{largest} with its gradients", before_a_plan=True)


def check_drives(engines: Sequence[object], policy: object) -> None:
    """Raise OffloadConfigError if there is no drive, or an engine or the policy has the wrong type."""
    if not engines:
        raise OffloadConfigError("there is no drive: name at least one directory or engine")
    for each in engines:
        if not isinstance(each, Device) and not all(hasattr(each, name) for name in ("reserve", "write", "read")):
            raise OffloadConfigError(f"engines must have drives (elastrain.offload.drives), got {each!r}")
    if policy is not None and not isinstance(policy, Policy):
        raise OffloadConfigError(f"policy must be a Policy of elastrain.offload.planning.plan_search, got {policy!r}")


def norm_bound(value: object) -> float | None:
    """Return the bound of the gradients' norm, or None. Raises OffloadConfigError if it is negative or not a number."""
    if value is None:
        return None
    try:
        found = math.nan if isinstance(value, str | bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not found >= 0.0:
        raise OffloadConfigError(f"max_grad_norm must be a number that is not negative, or None, got {value!r}")
    return found
