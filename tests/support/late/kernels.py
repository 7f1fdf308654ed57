"""The fallback: every operator runs the CPU's kernel on the bytes behind the device's tensors.

Arguments that lie elsewhere are refused as CUDA refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.support.late import private_names as private
from tests.support.late import randomness
from tests.support.late.memory import LOCK, MEMORY, alias_of, block_of, is_late, like, span_of
from tests.support.late.order import Clock, Span, Stream, Timed, reap, submit, this_thread, wait_for
from tests.support.late.settings import settings

Captured = tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]
"""An operator of a graph: its arguments, and what it has returned."""
_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_aten = torch.ops.aten
INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index")
"""Operators whose index may lie on the CPU: CUDA copies it."""
ON_HOST = {
    "aten::_pack_padded_sequence": {"lengths"},
    "aten::_fused_adam_.tensor_lr": {"lr"},
    "aten::_fused_adamw_.tensor_lr": {"lr"},
    "aten::_fused_sgd_.tensor_lr": {"lr"},
    "aten::_fused_adagrad_.tensor_lr": {"lr"},
}
"""Arguments that CUDA takes on the CPU, whatever their size."""


class Plan:
    """An operator as its schema describes it."""

    def __init__(self, operator: Any) -> None:
        schema = operator._schema
        arguments = schema.arguments
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        self.name = schema.name + overload
        self.names = [argument.name for argument in arguments]
        self.written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        self.numbers = {a.name for a in arguments if str(a.type) == "Tensor"}
        self.takes_numbers = private.takes_numbers(schema.name)
        self.sources = [_source(returned, arguments) for returned in schema.returns]
        """For each returned value, the argument that it is, or None if it is new."""
        self.is_single = len(schema.returns) == 1
        aliases = [returned.alias_info for returned in schema.returns]
        self.is_view = bool(aliases) and all(info is not None and not info.is_write for info in aliases)
        self.is_indexing = self.name.startswith(INDEXING)
        self.waits = not self.is_indexing and any(tag in operator.tags for tag in _WAITS)
        self.draws = torch.Tag.nondeterministic_seeded in operator.tags
        self.takes_generator = "generator" in self.names


def _source(returned: Any, arguments: Any) -> str | None:
    if returned.alias_info is None:
        return None
    with_alias = (a for a in arguments if a.alias_info is not None)
    return next((a.name for a in with_alias if a.alias_info.before_set == returned.alias_info.before_set), None)


@functools.cache
def plan_of(operator: Any) -> Plan:
    return Plan(operator)


class Call:
    """One call of an operator: its arguments on the CPU, and the memory that it accesses."""

    def __init__(self, operator: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.plan = plan
        self.given = dict(zip(plan.names, args, strict=False)) | kwargs
        self.reads: list[Span] = []
        self.writes: list[Span] = []
        self._device_of: dict[int, Tensor] = {}
        """Address of the CPU's bytes -> the tensor on the device that has them."""
        self._elsewhere: list[tuple[str, Tensor]] = []
        self.has_host_index = False
        count = len(args)
        on_host = [self._on_host(name, value) for name, value in self.given.items()]
        self.args = on_host[:count]
        self.kwargs = dict(zip(list(self.given)[count:], on_host[count:], strict=True))
        for name, tensor in self._elsewhere:
            refuse(plan.name, name, tensor, name in plan.written)
        if not settings.float64 and any(_is_float64(value) for value in self.given.values()):
            raise RuntimeError(f"Required aspect fp64 is not supported on the device (in {plan.name})")
        if "device" in self.kwargs:
            self.kwargs["device"] = torch.device("cpu")
        self.waits = plan.waits or (plan.is_indexing and self._is_waiting_index())

    def _is_waiting_index(self) -> bool:
        indices = [each for each in self.given["indices"] if each is not None]
        return any(each.dtype in (torch.bool, torch.uint8) or not is_late(each) for each in indices)

    def _on_host(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._alias(name, value)
        if isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
            return [self._alias(name, each) if isinstance(each, Tensor) else each for each in value]
        if name in self.plan.numbers and isinstance(value, bool | int | float | complex):
            return value if self.plan.takes_numbers else self._as_tensor(value)
        return value

    def _alias(self, name: str, tensor: Tensor) -> Tensor:
        if not is_late(tensor):
            self._elsewhere.append((name, tensor))
            return tensor
        block = block_of(tensor)
        (self.writes if name in self.plan.written else self.reads).append((block, span_of(tensor)))
        self._device_of[block.host.data_ptr()] = tensor
        return alias_of(tensor)

    def _as_tensor(self, value: Any) -> Tensor:
        """Return a number that the dispatcher had wrapped in a tensor, with the dtype that changes no other's."""
        tensors = [each for each in self.given.values() if isinstance(each, Tensor) and each.is_floating_point()]
        dtype = None
        if isinstance(value, float) and tensors:
            dtype = torch.float64 if any(each.dim() for each in tensors) else tensors[0].dtype
        return torch.tensor(value, dtype=dtype)

    def on_device(self, made: Any, source: str | None, stream: Stream) -> Any:
        """Return what the CPU's kernel returned, as the device has it."""
        if isinstance(made, list | tuple):
            return type(made)(self.on_device(each, source, stream) for each in made)
        if not isinstance(made, Tensor):
            return made
        known = self._device_of.get(made.untyped_storage().data_ptr()) if made.numel() else None
        given = self.given.get(source) if source else None
        if isinstance(given, Tensor) and source in self.plan.written:
            return given if self._is_at(given, made) else self._moved(given, made, stream)
        if known is not None and known.dtype == made.dtype:
            return like(known, made)
        made_there = wrap(made, stream, self.plan.name)
        self._device_of[made.untyped_storage().data_ptr()] = made_there
        return made_there

    @staticmethod
    def _is_at(given: Tensor, made: Tensor) -> bool:
        if not is_late(given):
            return True
        block = block_of(given)
        return made.shape == given.shape and made.untyped_storage().nbytes() == block.nbytes

    @staticmethod
    def _moved(given: Tensor, made: Tensor, stream: Stream) -> Tensor:
        """Give an `out` that was resized its new memory."""
        fresh = wrap(made, stream, "resize")
        place = fresh.untyped_storage(), fresh.storage_offset(), fresh.shape, fresh.stride()
        _aten.set_.source_Storage_storage_offset.redispatch(private.CPU_KEYS, given, *place)
        return given


def wrap(host: Tensor, stream: Stream, what: str) -> Tensor:
    """Return a device tensor over the bytes of a CPU tensor that no other code has."""
    if host.layout is not torch.strided:
        raise NotImplementedError(f"late has no tensors of layout {host.layout}, which {what} makes")
    reap()
    block = MEMORY.adopt(host.untyped_storage(), stream.number)
    block.accesses[(0, block.nbytes, stream.number, True)] = (stream.clock.get(stream.number, 0), what)
    return like(MEMORY.flat(block, host.dtype), host)


def _is_float64(value: object) -> bool:
    return value is torch.float64 or (isinstance(value, Tensor) and value.dtype is torch.float64)


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the current stream."""
    plan = plan_of(operator)
    if plan.is_view:
        return operator.redispatch(private.CPU_KEYS, *args, **kwargs)
    with LOCK:
        call = Call(operator, plan, args, kwargs)
        stream, _ = submit(plan.name, call.reads, call.writes)
        this_thread().counts["kernels"] += 1
        with Timed(stream), _as_on_device(call), _without_cpu_autocast():
            made = operator(*call.args, **call.kwargs)
        values = (made,) if plan.is_single else made
        given = [call.on_device(*each, stream) for each in zip(values or (), plan.sources, strict=True)]
    if (captured := this_thread().captured) is not None:
        if call.waits:
            refuse_in_capture(plan.name)
        captured.append((operator, args, kwargs, given))
    if call.waits:
        wait_for(Clock(stream.clock), stream.hang)
    return None if not plan.sources else given[0] if plan.is_single else tuple(given)


def refuse_in_capture(what: str) -> None:
    """Raise CUDA's error for what waits for the host, or reads it, while the thread captures a graph."""
    if this_thread().captured is not None:
        raise RuntimeError(f"LATE error: operation not permitted when stream is capturing ({what})")


def _as_on_device(call: Call) -> AbstractContextManager[None]:
    """Let random numbers come from the device's generator."""
    if call.plan.takes_generator:
        refuse_generator(call.given.get("generator"), randomness.GENERATOR)
        place = call.plan.names.index("generator")
        if place < len(call.args):
            call.args[place] = randomness.GENERATOR
        else:
            call.kwargs["generator"] = randomness.GENERATOR
    elif call.plan.draws:
        return randomness.in_place_of_cpu()
    return nullcontext()


def _without_cpu_autocast() -> AbstractContextManager[None]:
    """Keep an autocast of the CPU, which does not concern the device, away from its kernels."""
    if torch.is_autocast_enabled("cpu"):
        return private.without_keys(private.AUTOCAST_CPU_KEYS)  # type: ignore[no-any-return]
    return nullcontext()


def fallback_of(operator: Any) -> Callable[..., Any]:
    return functools.partial(run, operator)


def refuse(operator: str, argument: str, tensor: Tensor, is_written: bool) -> None:
    """Raise torch's own words for an argument that lies elsewhere, unless CUDA takes it."""
    if tensor.device.type == "cpu" and not is_written:
        if argument in ON_HOST.get(operator, ()):
            return
        if not tensor.dim() and (operator in private.elementwise() or operator.startswith("aten::_foreach_")):
            return
        if argument == "indices" and operator.startswith(INDEXING):
            return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, late:0 and {tensor.device}! "
        f"(when checking argument for argument {argument} in method {operator})"
    )


def refuse_generator(given: Any, own: Any) -> None:
    if given is not None and given._cdata != own._cdata:
        raise RuntimeError(f"Expected a 'late' device type for generator but found '{given.device.type}'")
