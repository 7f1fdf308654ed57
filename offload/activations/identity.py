"""Description of a saved tensor: its storage, its view, its version, and whether spilling is worthwhile.

Versions are watched without keeping memory: an alias with an empty storage shares the tensor's version counter.
"""

from __future__ import annotations

import warnings
import weakref
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from elastrain.device import is_accelerator
from elastrain.offload.activations.pass_records import SpillRecord
from elastrain.offload.errors import ModifiedInPlaceError

# Attributes of a storage object live as long as the storage, and all views of it see them.
_RECORD = "_elastrain_offload_record"
_STAYS = "_elastrain_offload_stays"
_CLAIMS = ("resize_", "copy_", "fill_", "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_")


class TensorView(NamedTuple):
    """The position of a tensor in its storage: dtype, offset, shape and strides."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor over `storage`, which holds the same bytes."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )


def view_of(tensor: torch.Tensor) -> TensorView:
    """Return the tensor's position in its storage."""
    return TensorView(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _changed(module: str, version: int, now: int) -> ModifiedInPlaceError:
    return ModifiedInPlaceError(
        f"a tensor saved for backward in {module} was changed in place afterwards (it is at version {now}, saved at "
        f"version {version}): its gradient would be wrong; replace the in-place operation"
    )


class VersionWatch:
    """A detector of in-place changes of a tensor, and of all tensors that share its version counter through views."""

    __slots__ = ("_alias", "_module", "_version")

    def __init__(self, tensor: torch.Tensor, module: str) -> None:
        self._alias = tensor.detach()
        self._alias.data = _nothing(tensor.dtype, tensor.device)
        self._version = tensor._version
        self._module = module

    def check(self) -> None:
        """Raise `ModifiedInPlaceError` if the tensor was changed since it was saved."""
        if self._alias._version != self._version:
            raise _changed(self._module, self._version, self._alias._version)

    def watched(self, memory: torch.Tensor) -> torch.Tensor:
        """Return `memory` as a tensor with the original version counter, so that in-place changes stay detectable."""
        found = self._alias.detach()
        found.data = memory
        return found


class StayingTensor:
    """A graph node's reference to a tensor that stays in memory."""

    __slots__ = ("_module", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, module: str) -> None:
        # A graph node must not hold a tensor that refers to the node: that cycle would never be freed.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()  # detach() shares the version counter
        self._version = tensor._version
        self._module = module

    def tensor(self) -> torch.Tensor:
        """Return the tensor. Raises `ModifiedInPlaceError` if it was changed since it was saved."""
        tensor = self._tensor
        if tensor._version != self._version:
            raise _changed(self._module, self._version, tensor._version)
        return tensor


class SpillHandle:
    """A graph node's reference to a tensor that may leave memory. The manager is notified when the node frees it."""

    __slots__ = ("__weakref__", "record", "view", "watch")
    record: SpillRecord

    def __init__(self, view: TensorView, watch: VersionWatch | None) -> None:
        self.view = view
        self.watch = watch


def stays_because(tensor: torch.Tensor, *, min_bytes: int) -> str | None:
    """Return why a tensor stays in memory and is not counted, or None if it is handed to the manager."""
    if not has_plain_memory(tensor):
        return "it is not a plain strided tensor"
    whole = _whole(tensor)
    if type(whole) is torch.nn.Parameter or (whole.is_leaf and whole.requires_grad):
        return "it is a parameter or a view of one"
    storage = tensor.untyped_storage()
    if storage.nbytes() < max(1, min_bytes):
        return "it is small"
    if hasattr(storage, _STAYS):
        return "it shares the memory of a parameter"
    if is_part(tensor) and not tensor.requires_grad:
        return "it is a part of memory that no forward computed: of a data set, say, which is there anyway"
    return None


def is_part(tensor: torch.Tensor) -> bool:
    """Return True if a tensor covers only a part of its storage.

    Other parts may change without changing its version.
    """
    # torch's recurrent cells split gates (`unsafe_chunk`) and change them one by one, so that a copy would be outdated.
    whole = _whole(tensor)
    return whole.numel() * whole.element_size() != tensor.untyped_storage().nbytes()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's values lie in a storage that can be moved."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and can_move(tensor.device.type)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
        and not tensor._is_zerotensor()  # a tangent of forward-mode differentiation, which has no memory
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@cache
def can_move(device_type: str) -> bool:
    """Return True if storages of such a device can be moved. Warns, once, about a device that holds others."""
    if device_type in ("cpu", "meta"):
        return device_type == "cpu"
    if is_accelerator(torch.device(device_type)):
        return True
    warnings.warn(
        f"save_on_disk leaves tensors on {device_type!r} where they are, because torch has no streams and events for "
        "this device: memory_limit does not bound them",
        stacklevel=2,
    )
    return False


def mark_as_staying(tensor: torch.Tensor) -> None:
    """Keep in memory everything that shares this tensor's storage."""
    if has_plain_memory(tensor):
        setattr(tensor.untyped_storage(), _STAYS, True)


def record_of(tensor: torch.Tensor, *, pinned: bool) -> SpillRecord | None:
    """Return the record of the tensor's storage if it was saved at this version or is pinned, else None."""
    reference: weakref.ref[SpillRecord] | None = getattr(tensor.untyped_storage(), _RECORD, None)
    record = reference() if reference is not None else None
    if record is None or record.origin.pinned != pinned:
        return None
    return record if pinned or record.origin.version == tensor._version else None


def remember(tensor: torch.Tensor, record: SpillRecord) -> None:
    """Attach `record` to the tensor's storage, so that `record_of` finds it when another view is saved."""
    setattr(tensor.untyped_storage(), _RECORD, weakref.ref(record))


_keepers: weakref.WeakSet[Any] = weakref.WeakSet()


def tell_of_claims(storage: torch.UntypedStorage, keeper: object) -> None:
    """Call `keeper.claim` before the program frees or overwrites the storage. No version counter shows that."""
    _keepers.add(keeper)
    if "resize_" not in vars(storage):
        for name in _CLAIMS:
            setattr(storage, name, partial(_claim, name, weakref.ref(storage)))


def _claim(name: str, reference: weakref.ref[torch.UntypedStorage], *given: Any, **named: Any) -> Any:
    storage = reference()
    assert storage is not None
    for keeper in list(_keepers):
        keeper.claim(storage)
    return getattr(torch.UntypedStorage, name)(storage, *given, **named)
