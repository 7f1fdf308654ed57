"""Kernels that are registered by name: memory, views, copies, and everything that torch would compute in other parts.

Where the CPU has a kernel of its own and torch a composite for all other devices, the composite would be chosen here,
and its bits may differ. So the fallback is registered for each of these operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.late import private_names as private
from tests.support.late.copies import copy_
from tests.support.late.faults import faults
from tests.support.late.kernels import fallback_of, run, wrap
from tests.support.late.memory import LOCK, MEMORY, NAME, block_of, is_late
from tests.support.late.order import STREAMS, current_stream, reap, submit

Storage = torch.UntypedStorage
COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
CONVOLUTION = ("aten::convolution", "aten::convolution_backward")
"""Composites that choose a backend by the device; run on the CPU they choose the CPU's."""
OF_CPU = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
"""Operators that change how a tensor shows its memory, and never look at it."""
_KEY = "PrivateUse1"
_TO_COPY = private.overload("_to_copy")


def register() -> None:
    _register_storages()
    private.register_for_all(_run_any, _KEY)
    own = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "resize_": _resize,
        "copy_": copy_,
        "_to_copy": _to_copy,
        "record_stream": _record_stream,
        "_assert_async": _assert_async,
        "_assert_async.msg": _assert_async,
    }
    for name, kernel in own.items():
        private.register(name, kernel, _KEY)
    for name in OF_CPU:
        private.register(name, _of_cpu(private.overload(name)), _KEY)
    for name in (*CONVOLUTION, *_of_own_on_cpu()):
        if name.removeprefix("aten::") not in (*own, *OF_CPU):
            private.register(name.removeprefix("aten::"), fallback_of(private.overload(name)), _KEY)


def _of_own_on_cpu() -> list[str]:
    return [
        name
        for name in private.all_operators()
        if name.startswith("aten::")
        and private.has_kernel(name, "CPU")
        and any(private.has_kernel(name, key) for key in COMPOSITES)
    ]


def _run_any(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return fallback_of(operator)(*args, **kwargs)


def _of_cpu(operator: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(private.CPU_KEYS, *args, **kwargs)

    return kernel


def _empty(
    size: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: object = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    layout_of_memory = memory_format or torch.contiguous_format
    with LOCK:
        reap()
        MEMORY.check_room(torch.empty(size, dtype=dtype, device="meta").nbytes)  # before the host may lack the room
    return _poisoned(torch.empty(size, dtype=dtype, layout=layout, memory_format=layout_of_memory))


def _empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: object = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return _poisoned(torch.empty_strided(size, stride, dtype=dtype, layout=layout))


def _poisoned(host: Tensor) -> Tensor:
    """Return it on the device, with every bit set: NaN, for floating-point numbers."""
    faults.touch()
    with LOCK:
        made = wrap(host, current_stream(), "empty")
        if storage := host.untyped_storage():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        return made


def _resize(self: Tensor, size: Any, *, memory_format: torch.memory_format | None = None) -> Tensor:
    shown = torch.empty(size, dtype=self.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    needed = (self.storage_offset() + shown.numel()) * self.element_size()
    owner = (
        self
        if needed <= self.untyped_storage().nbytes()
        else _empty((needed // self.element_size(),), dtype=self.dtype)
    )
    if owner is not self and self.numel():
        _empty_view(owner, self).copy_(self)
    place = owner.untyped_storage(), self.storage_offset(), shown.shape, shown.stride()
    return _of_cpu(private.overload("set_.source_Storage_storage_offset"))(self, *place)  # type: ignore[no-any-return]


def _empty_view(owner: Tensor, shown: Tensor) -> Tensor:
    return owner.as_strided(shown.shape, shown.stride(), shown.storage_offset())


def _to_copy(self: Tensor, *, non_blocking: bool = False, **how: Any) -> Tensor:
    """Copy to another dtype or device. torch would pin the destination of a late copy, which this device cannot."""
    device, dtype, format_ = how.get("device"), how.get("dtype"), how.get("memory_format")
    if not (non_blocking and device is not None and device.type == "cpu"):
        return _of_cpu(_TO_COPY)(self, non_blocking=non_blocking, **how)  # type: ignore[no-any-return]
    shown = torch.empty_strided(self.shape, self.stride(), dtype=dtype or self.dtype, device="meta")
    made = torch.empty_like(shown, device="cpu", memory_format=format_ or torch.preserve_format)
    return made.copy_(self, non_blocking=True)


def _record_stream(self: Tensor, stream: torch.Stream) -> None:
    if is_late(self):
        block_of(self).recorded.add(STREAMS[stream.stream_id].number)


def _assert_async(self: Tensor, assert_msg: str = "") -> None:
    """Break the device if the value is zero, as an assertion in a kernel of CUDA does."""
    try:
        run(private.overload("_assert_async"), self)
    except RuntimeError:
        faults.touch()
        faults.break_by("device-side assert triggered")


def _register_storages() -> None:
    kept: Any = Storage
    clone, to = kept.clone, kept.to

    def clone_here(self: Storage) -> Storage:
        return _on_device(self) if self.device.type == NAME else clone(self)

    def to_there(self: Storage, *, device: Any, non_blocking: bool = False) -> Storage:
        is_coming = torch.device(device).type == NAME and self.device.type != NAME
        return _on_device(self) if is_coming else to(self, device=device, non_blocking=non_blocking)

    kept.clone, kept.to = clone_here, to_there
    resize: Any = kept.resize_
    nbytes: Any = kept.nbytes

    def resize_here(self: Storage, size: int) -> Storage:
        if self.device.type != NAME:
            return resize(self, size)  # type: ignore[no-any-return]
        with LOCK:
            reap()
            block = MEMORY.blocks[self.data_ptr()]
            submit("resize_", [], [(block, (0, block.nbytes))])  # whoever uses the old bytes comes before
            MEMORY.resize(block, size)
            submit("resize_", [], [(block, (0, block.nbytes))])  # and whoever uses the new ones, which were another's
        return self

    def nbytes_here(self: Storage) -> int:
        block = MEMORY.blocks.get(self.data_ptr()) if self.device.type == NAME else None
        return int(nbytes(self)) if block is None else block.nbytes

    kept.resize_, kept.nbytes = resize_here, nbytes_here


def _on_device(storage: Storage) -> Storage:
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=NAME)
    return made.copy_(_bytes(storage)).untyped_storage()


def _bytes(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
