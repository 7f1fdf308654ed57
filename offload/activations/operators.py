"""The two operators in compiled programs: `leave` gives a saved value away, and `come_back` returns it.

Between them the program holds a handle: eight bytes in host memory. The value is freed when the handle is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from elastrain.offload.activations.identity import mark_as_staying
from elastrain.offload.compiled_runs import KeptValue, keep

# Attributes of a storage object live as long as the storage, and all views of it see them.
_KEPT = "_elastrain_kept_value"
_library: Any = torch.library.Library("elastrain", "DEF")  # type: ignore[no-untyped-call]
# The operators exist as long as the library object.
# Strides must be exact, because the graph contains the layout of the value, and `come_back` cuts views out of it.
_TAGS = (torch.Tag.needs_exact_strides,)
_library.define("leave(Tensor value) -> Tensor", tags=_TAGS)
_library.define(
    "come_back(Tensor handle, Tensor after, ScalarType dtype, Device device, int[] place) -> Tensor", tags=_TAGS
)
LEAVE = torch.ops.elastrain.leave.default
COME_BACK = torch.ops.elastrain.come_back.default


def new_handle() -> torch.Tensor:
    """Return a handle without a value."""
    return torch.zeros(1, dtype=torch.int64, device="cpu")


@torch.library.impl(_library, "leave", "CompositeExplicitAutograd")
def _leave(value: torch.Tensor) -> torch.Tensor:
    handle = new_handle()
    mark_as_staying(handle)
    setattr(handle.untyped_storage(), _KEPT, keep(value))
    return handle


@torch.library.impl(_library, "come_back", "CompositeExplicitAutograd")
def _come_back(
    handle: torch.Tensor,
    after: torch.Tensor,  # unused: the compiler must compute it before this call
    dtype: torch.dtype,
    device: torch.device,
    place: Sequence[int],
) -> torch.Tensor:
    kept: KeptValue = getattr(handle.untyped_storage(), _KEPT)
    whole, (offset, size, stride) = kept.bring(), _cut(place)
    return torch.empty(0, dtype=dtype, device=device).set_(
        whole.untyped_storage(), whole.storage_offset() + offset, size, stride
    )


def place_in(value: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Return where a view lies in the value that left: its offset, its size, then its strides."""
    return [int(value.storage_offset()) - int(whole.storage_offset()), *value.shape, *value.stride()]


def _cut(place: Sequence[int]) -> tuple[int, Sequence[int], Sequence[int]]:
    dimensions = len(place) // 2
    return place[0], place[1 : 1 + dimensions], place[1 + dimensions :]


@torch.library.register_fake("elastrain::leave", lib=_library)  # type: ignore[untyped-decorator]
def _fake_leave(value: torch.Tensor) -> torch.Tensor:
    return new_handle()


@torch.library.register_fake("elastrain::come_back", lib=_library)  # type: ignore[untyped-decorator]
def _fake_come_back(
    handle: torch.Tensor, after: torch.Tensor, dtype: torch.dtype, device: torch.device, place: Sequence[int]
) -> torch.Tensor:
    _, size, stride = _cut(place)
    return torch.empty_strided(size, stride, dtype=dtype, device=device)
