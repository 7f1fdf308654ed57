"""Shareable device memory without a device: who reads whose memory, and what CUDA's driver is asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from elastrain.device import cuda_sharing
from elastrain.device.cuda_sharing import CudaDriver, CudaSharing
from elastrain.device.device_sharing import SharingError, domain_of, sharing_of
from elastrain.device.same_memory import HOST
from elastrain.device.sharing_probe import _is_whole


class Named:
    """A device among others."""

    def __init__(self, index: int, *identities: str) -> None:
        self.index, self.identities = index, identities


def domain(index: int, identities: Sequence[str], readable: Sequence[int]) -> str:
    return domain_of(Named(index, *identities), readable)  # type: ignore[arg-type]


def test_processes_that_see_the_same_devices_read_each_other_if_each_reads_all() -> None:
    one, two = domain(0, ("a", "b"), (0, 1)), domain(1, ("a", "b"), (0, 1))
    assert one == two == domain(0, ("b", "a"), (1, 0)) != ""
    assert domain(0, ("a", "b"), (0,)) == domain(0, ("a",), (0,)) == domain(1, ("c", "a"), (1,))
    assert len({one, domain(0, ("a",), (0,)), domain(0, ("b",), (0,)), domain(0, ("a", "c"), (0, 1))}) == 4
    assert domain(0, ("a", "b"), (1,)) == domain(0, ("a",), ()) == ""


def test_a_kind_without_shareable_memory_says_so() -> None:
    with pytest.raises(SharingError, match="no memory of cpu devices is shared between processes"):
        sharing_of(HOST)


class Library:
    """A driver's library that notes what it is called for. `failing`: functions that return an error, as often."""

    def __init__(self, **failing: int) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        if name == "cuMissing":
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if self._failing.get(name, 0):
                self._failing[name] -= 1
                return 2
            self._answer(name, arguments)
            return 0

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        values = {
            "cuMemAddressReserve": 0x7000,
            "cuMemGetAllocationGranularity": 1 << 21,
            "cuDeviceGetAttribute": 1,
            "cuMemCreate": 11,
            "cuMemImportFromShareableHandle": 12,
            "cuMemExportToShareableHandle": 99,
        }
        if name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
        elif name == "cuDeviceGet":
            arguments[0]._obj.value = arguments[1].value
        elif name in values:
            arguments[0]._obj.value = values[name]

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_structures_have_the_drivers_sizes() -> None:
    sizes = {ctypes.sizeof(each) for each in (cuda_sharing._Allocation,)}, ctypes.sizeof(cuda_sharing._Access)
    assert sizes == ({32}, 12)


def test_an_error_of_the_driver_has_its_name() -> None:
    with pytest.raises(SharingError, match=r"cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY \(no memory left\)"):
        CudaDriver(Library(cuMemCreate=1)).call("cuMemCreate")
    with pytest.raises(SharingError, match="this driver has no cuMissing"):
        CudaDriver(Library()).call("cuMissing")


@pytest.mark.parametrize(
    ("failing", "undone"),
    [("cuMemMap", ["cuMemAddressFree"]), ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"])],
)
def test_a_mapping_that_fails_leaves_nothing(failing: str, undone: list[str]) -> None:
    library = Library(**{failing: 1})
    with pytest.raises(SharingError, match=failing):
        CudaDriver(library).map(ctypes.c_uint64(1), 4096, 0, 1)
    assert [name for name in library.names() if name in ("cuMemUnmap", "cuMemAddressFree")] == undone


def sharing(monkeypatch: pytest.MonkeyPatch, library: Library) -> CudaSharing:
    """Return the shareable memory of the second of two devices, without any of them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, device=None: empty(size))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda each: type("P", (), {"uuid": f"u{each}"}))
    return CudaSharing(1, CudaDriver(library))


def test_cuda_memory_is_exported_as_a_descriptor_and_kept_by_its_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    made = sharing(monkeypatch, library)
    assert made.identities == ("cuda u0", "cuda u1") and made.page_bytes == 1 << 21
    library.calls.clear()
    fd, mapping = made.create(1 << 21)
    assert (fd, mapping.address, mapping.size_bytes) == (99, 0x7000, 1 << 21)
    asked = ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"]
    assert library.names() == [*asked, "cuMemRelease"]
    wish = library.calls[0][1][2]._obj
    assert (wish.type, wish.handle_types, wish.location.type, wish.location.id) == (1, 1, 1, 1)
    library.calls.clear()
    del mapping
    assert library.names() == ["cuMemUnmap", "cuMemAddressFree"]


def test_cuda_memory_that_cannot_be_exported_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(cuMemExportToShareableHandle=1)
    with pytest.raises(SharingError, match="cuMemExportToShareableHandle"):
        sharing(monkeypatch, library).create(1 << 21)
    assert {"cuMemRelease", "cuMemUnmap", "cuMemAddressFree"} <= set(library.names())


def test_a_peers_cuda_memory_is_mapped_read_only_where_the_driver_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for refusals, flags in ((0, [1]), (1, [1, 3])):
        library = Library()
        made = sharing(monkeypatch, library)
        library.calls.clear()
        library._failing = {"cuMemSetAccess": refusals}
        mapping = made.open(5, 1 << 21)
        assert mapping.address == 0x7000 and library.calls[0][1][1].value == 5
        assert [given[2]._obj.flags for name, given in library.calls if name == "cuMemSetAccess"] == flags
        assert library.names()[-1] == "cuMemRelease"


class Elsewhere:
    """Memory of a device that torch does not use as it lies."""

    size_bytes = 4096

    def bytes_at(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        raise SharingError("torch does not use the memory")


def test_memory_of_another_device_that_torch_cannot_use_is_not_readable() -> None:
    sharing: Any = Named(0, "a", "b")
    sharing.page_bytes = 4096
    assert not _is_whole(sharing, Elsewhere(), 1)  # type: ignore[arg-type]
    with pytest.raises(SharingError, match="torch does not use the memory"):
        _is_whole(sharing, Elsewhere(), 0)  # type: ignore[arg-type]
