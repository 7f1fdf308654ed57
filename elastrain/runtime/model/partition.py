"""Description of the user's model and optimizer for the partition: names the blocks, and refuses what cannot be cut.

Reads the model and changes nothing. `elastrain.job.layout` does the partition itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elastrain.device.finding import is_accelerator
from elastrain.errors import ConfigError
from elastrain.job.layout import FROZEN, STATISTICS, Layout, ParameterSpec, cut
from elastrain.offload.overlaps import WAY_OUT, shared_memory
from elastrain.pipeline.stubs.naming import blocks_of, plain_name
from elastrain.runtime.loader.loader import DataLoader
from elastrain.runtime.loader.torch_loader import from_torch
from elastrain.runtime.model.statistics import buffers_of, tracking

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Supported dtypes of parameters."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """One place where a parameter is registered: `setattr(module, attribute, …)` replaces it."""

    module: nn.Module
    attribute: str
    name: str
    block: str


def check_given(model: object, optimizer: object, loader: object, blocks: Sequence[object] | None) -> DataLoader:
    """Return the loader of the job. Raises ConfigError if an argument of `prepare` has the wrong type."""
    if isinstance(loader, torch.utils.data.DataLoader):
        loader = from_torch(loader)
    data = "elastrain.DataLoader(dataset, global_batch_size=…, micro_batch_size=…)"
    for name, given, kind, wanted in (
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer of the model's parameters"),
        ("loader", loader, DataLoader, data),
    ):
        if not isinstance(given, kind):
            what = type(given)
            got = f"the class {given.__qualname__}" if isinstance(given, type) else f"{what.__module__}.{what.__name__}"
            raise ConfigError(f"job.prepare(model, optimizer, loader): the {name} must be {wanted}; got {got}")
    if isinstance(blocks, str) or not all(isinstance(each, str) for each in blocks or ()):
        raise ConfigError(f"blocks must be a list of names of submodules; got {blocks!r}")
    assert isinstance(loader, DataLoader)
    return loader


def named_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the blocks in the model's order (see `blocks_of`), led by `""` if some parameters lie in no block.

    Raises ConfigError for patterns without a match, and for blocks without parameters.
    """
    blocks = blocks_of(model, patterns)
    used = {registration.block for places in registrations_of(model, blocks) for registration in places}
    used |= {_block_of(plain_name(path), blocks) for path, _ in tracking(model)}
    empty = [name for name in blocks if name not in used]
    if empty:
        raise ConfigError(f"these blocks own no parameter: {empty}; leave them out")
    return ("", *blocks) if "" in used else blocks


def registrations_of(model: nn.Module, blocks: Iterable[str]) -> list[list[Registration]]:
    """Return, per distinct parameter in the model's order, all places where it is registered."""
    places: dict[int, list[Registration]] = {}
    for raw, module in model.named_modules():
        path = plain_name(raw)
        block = _block_of(path, blocks)
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            place = Registration(module=module, attribute=attribute, name=name, block=block)
            places.setdefault(id(parameter), []).append(place)
    return list(places.values())


def readers_of(model: nn.Module, layout: Layout) -> dict[int, tuple[int, ...]]:
    """Return, per flat with its own parameters, the blocks that read it: several only for tied weights."""
    found = {flat.index: {flat.block} for flat in layout.flats if flat.alias_of is None}
    places = registrations_of(model, layout.blocks)
    for leaf in layout.leaves:
        # A frozen tied weight has no alias flat, so its registrations show which blocks read it.
        if leaf.flat in found and leaf.parameter < len(places):
            found[leaf.flat] |= {layout.blocks.index(place.block) for place in places[leaf.parameter]}
    return {flat: tuple(sorted(blocks)) for flat, blocks in found.items()}


def _block_of(path: str, blocks: Iterable[str]) -> str:
    """Return the innermost block that contains a module, or "" if none does."""
    return max((name for name in blocks if name and f"{path}.".startswith(f"{name}.")), key=len, default="")


def parameter_at(place: Registration) -> nn.Parameter:
    """Return the parameter that is registered at a place."""
    parameter = getattr(place.module, place.attribute)
    assert isinstance(parameter, nn.Parameter)
    return parameter


def describe(model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[str] | None = None) -> Layout:
    """Return the layout of the model for this optimizer. `blocks`: names of submodules or patterns.

    Raises ConfigError for models and optimizers that cannot be cut. See `named_blocks` for the default blocks.
    """
    _check_layers(model)
    names = named_blocks(model, blocks)
    groups = _groups(optimizer)
    places = registrations_of(model, names)
    _check_optimizer(optimizer, {id(parameter_at(p[0])) for p in places}, groups)
    specs, ties = [], {}
    for registrations in places:
        parameter = parameter_at(registrations[0])
        home, *others = sorted({place.block for place in registrations}, key=names.index)
        first = next(place for place in registrations if place.block == home)
        _check_parameter(first.name, parameter, trained=id(parameter) in groups)
        ties[first.name] = tuple(others)
        specs.append(
            ParameterSpec(
                name=first.name,
                block=home,
                shape=tuple(parameter.shape),
                dtype=name_of(parameter.dtype),
                group=groups.get(id(parameter), FROZEN),
                requires_grad=parameter.requires_grad,
            )
        )
    if not any(spec.trained and spec.numel for spec in specs):
        raise ConfigError(
            "the model has no parameter that requires a gradient and is in the optimizer: nothing to train"
        )
    if shared := shared_memory(model, lambda parameter: parameter.requires_grad and id(parameter) in groups):
        raise ConfigError(f"{shared[0]!r} and {shared[1]!r} of the model {WAY_OUT}")
    specs += _statistics(model, names)
    _check_one_device(model)
    return cut(specs, blocks=names, ties=ties)


def _check_layers(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{type(module).__name__} {path!r} has max_norm={module.max_norm}: it changes its weight in the "
                "forward, outside of the optimizer. Leave max_norm out and scale the rows that the forward looks up"
            )
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            check_device(f"{path}.{name}" if path else name, tensor.device)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta or is_lazy(buffer):
                where = "no size before the first forward" if is_lazy(buffer) else "no data (meta device)"
                raise ConfigError(
                    f"buffer {f'{path}.{name}' if path else name!r} has {where}: initialise the model before prepare"
                )


def _check_one_device(model: nn.Module) -> None:
    """Raise ConfigError if parameters and buffers are on several devices."""
    first: dict[torch.device, str] = {}
    for kind, found in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in found:
            first.setdefault(tensor.device, f"{kind} {name!r}")
    if len(first) > 1:
        (device, name), (other, apart), *_ = first.items()
        raise ConfigError(
            f"{name} is on {device} and {apart} is on {other}: call model.to({str(device)!r}) before the optimizer is "
            "made and before prepare, so that all of the model is on one device"
        )


def check_device(name: str, device: torch.device) -> None:
    """Raise ConfigError for a device on which nothing trains. Tensors without data (meta) have a check of their own."""
    if device.type not in ("cpu", "meta") and not is_accelerator(device):
        raise ConfigError(
            f"{name!r} is on {device}, and models train on CPUs and on accelerators with streams, such as CUDA's: "
            f"leave .to({device.type!r}) out, or call model.cpu() before the optimizer is made and before prepare"
        )


def _statistics(model: nn.Module, blocks: Sequence[str]) -> list[ParameterSpec]:
    """Return specs of the running statistics. They are kept in float64, where counts are exact and small steps add up.

    The layers get rounded values.
    """
    return [
        ParameterSpec(
            name=plain_name(name),
            block=_block_of(plain_name(path), blocks),
            shape=tuple(value.shape),
            dtype="float64",
            group=STATISTICS,
            requires_grad=False,
        )
        for path, module in tracking(model)
        for name, value in buffers_of(path, module)
    ]


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return a dict of id(parameter) -> index of its group."""
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def _check_optimizer(optimizer: torch.optim.Optimizer, known: set[int], groups: dict[int, int]) -> None:
    if set(groups) - known:
        count = len(set(groups) - known)
        raise ConfigError(
            f"{count} of the optimizer's parameters are not the model's: make the optimizer from this model"
        )


def _check_parameter(name: str, parameter: nn.Parameter, *, trained: bool) -> None:
    problem = None
    if type(parameter) is not nn.Parameter:
        problem = f"is a {type(parameter).__name__}; tensor subclasses, lazy and distributed parameters cannot be cut"
    elif parameter.layout is not torch.strided:
        problem = f"has layout {parameter.layout}; only dense parameters can be cut"
    elif name_of(parameter.dtype) not in DTYPES:
        problem = f"is {parameter.dtype}; parameters are {', '.join(DTYPES)}: convert the model first"
    elif parameter.is_meta:
        problem = "has no data (meta device): initialise the model first"
    elif parameter.is_inference():
        problem = "was made under torch.inference_mode and cannot be trained: make the model outside of it"
    elif torch._debug_has_internal_overlap(parameter) == 1:
        problem = "has one memory for several elements (expand): call .contiguous() on it first"
    elif parameter.requires_grad and not trained:
        problem = "requires a gradient but is not in the optimizer: add it, or call requires_grad_(False) on it"
    if problem:
        raise ConfigError(f"parameter {name!r} {problem}")
