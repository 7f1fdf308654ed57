"""CUDA memory that other processes map: allocations of its virtual memory interface, exported as descriptors.

The functions are those of the driver (libcuda), called by ctypes, because torch has none that passes a descriptor.
Legacy IPC handles are not used: their memory goes with the process that allocated it.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from elastrain.device.device_sharing import SharingError

_PINNED, _FILE_DESCRIPTOR, _ON_DEVICE = 1, 1, 1
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE."""
_READ, _READ_WRITE = 1, 3
"""CU_MEM_ACCESS_FLAGS_PROT_READ and CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
_HAS_VIRTUAL_MEMORY, _HAS_DESCRIPTORS = 102, 103
"""Attributes of a device: virtual memory management; handles that are file descriptors."""
_OUT_OF_MEMORY = 2
_SEGMENT_BYTES = 64 << 20


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """Functions of libcuda that raise SharingError. `library`: the loaded library, or one with the same functions."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SharingError(f"the driver's library cannot be loaded: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by its name. Raises SharingError with the driver's word for its error."""
        function = getattr(self._library, name, None)
        if function is None:
            raise SharingError(f"this driver has no {name}")
        code = function(*arguments)
        if code:
            word = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(word))
            named = word.value.decode() if word.value else f"error {code}"
            raise SharingError(f"{name} failed: {named}{' (no memory left)' if code == _OUT_OF_MEMORY else ''}")

    def attribute(self, number: int, device: int) -> int:
        """Return an attribute of a device."""
        found = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(found), number, device)
        return found.value

    def map(self, handle: ctypes.c_uint64, size_bytes: int, device: int, flags: int) -> int:
        """Map an allocation for a device, and return its address. Raises SharingError, and leaves nothing then."""
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(size_bytes)
        self.call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_uint64(0), _none())
        try:
            self.call("cuMemMap", address, size, ctypes.c_size_t(0), handle, _none())
            try:
                wish = _Access(_Location(_ON_DEVICE, device), flags)
                self.call("cuMemSetAccess", address, size, ctypes.byref(wish), ctypes.c_size_t(1))
            except SharingError:
                self.call("cuMemUnmap", address, size)
                raise
        except SharingError:
            self.call("cuMemAddressFree", address, size)
            raise
        return address.value

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap memory that no work uses, and give its address back. An error is of no use here: it is ignored."""
        where, size = ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)
        self._library.cuMemUnmap(where, size)
        self._library.cuMemAddressFree(where, size)


def _none() -> ctypes.c_uint64:
    """Return flags, of which none is set."""
    return ctypes.c_uint64(0)


class _Bytes:
    """An array as CUDA's libraries for Python describe them to one another."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


class CudaMapping:
    """Device memory at an address of this process. It is unmapped when this object is garbage-collected."""

    def __init__(self, driver: CudaDriver, address: int, size_bytes: int, device: torch.device) -> None:
        self.address, self.size_bytes = address, size_bytes
        self._device = device
        weakref.finalize(self, driver.unmap, address, size_bytes).atexit = False

    def bytes_at(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """See `DeviceMapping.bytes_at`. Raises SharingError if torch copies the memory instead of using it."""
        address = self.address + offset_bytes
        made = torch.as_tensor(_Bytes(address, size_bytes), device=self._device)
        if made.data_ptr() != address:
            raise SharingError(f"torch does not use the memory at an address of {self._device} as it lies")
        return made


class CudaSharing:
    """The shareable memory of CUDA devices. See `DeviceSharing`."""

    segment_bytes = _SEGMENT_BYTES

    def __init__(self, index: int, driver: CudaDriver | None = None) -> None:
        """Start CUDA. Raises SharingError for devices and drivers that cannot share memory by descriptors."""
        self._driver = driver or CudaDriver()
        self.index = index
        self._device = torch.device("cuda", index)
        torch.empty(1, device=self._device)  # starts CUDA, and makes its context this thread's
        self.identities = tuple(
            f"cuda {torch.cuda.get_device_properties(each).uuid}" for each in range(torch.cuda.device_count())
        )
        self._driver_numbers = [self._driver_number(each) for each in range(len(self.identities))]
        for name, attribute in (("virtual memory", _HAS_VIRTUAL_MEMORY), ("exported descriptors", _HAS_DESCRIPTORS)):
            if not self._driver.attribute(attribute, self._driver_numbers[index]):
                raise SharingError(f"{self._device} has no {name}")
        granularity = ctypes.c_size_t()
        wish = self._wish(index)
        self._driver.call(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(wish), ctypes.c_int(0)
        )
        self.page_bytes = granularity.value

    def _driver_number(self, index: int) -> int:
        found = ctypes.c_int()
        self._driver.call("cuDeviceGet", ctypes.byref(found), ctypes.c_int(index))
        return found.value

    def _wish(self, index: int) -> _Allocation:
        location = _Location(_ON_DEVICE, self._driver_numbers[index])
        return _Allocation(type=_PINNED, handle_types=_FILE_DESCRIPTOR, location=location)

    def create(self, size_bytes: int, index: int | None = None) -> tuple[int, CudaMapping]:
        """See `DeviceSharing.create`."""
        self._use_context()
        handle, fd, wish = ctypes.c_uint64(), ctypes.c_int(-1), self._wish(self.index if index is None else index)
        self._driver.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size_bytes), ctypes.byref(wish), _none())
        try:
            address = self._driver.map(handle, size_bytes, self._driver_numbers[self.index], _READ_WRITE)
            mapping = CudaMapping(self._driver, address, size_bytes, self._device)
            self._driver.call(
                "cuMemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(_FILE_DESCRIPTOR), _none()
            )
        finally:
            self._driver.call("cuMemRelease", handle)  # the mapping and the descriptor keep the memory
        return fd.value, mapping

    def open(self, fd: int, size_bytes: int) -> CudaMapping:
        """See `DeviceSharing.open`. Drivers that map no memory of a device read-only map it writable."""
        self._use_context()
        handle, number = ctypes.c_uint64(), self._driver_numbers[self.index]
        self._driver.call(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(_FILE_DESCRIPTOR)
        )
        try:
            try:
                address = self._driver.map(handle, size_bytes, number, _READ)
            except SharingError:
                address = self._driver.map(handle, size_bytes, number, _READ_WRITE)
        finally:
            self._driver.call("cuMemRelease", handle)
        return CudaMapping(self._driver, address, size_bytes, self._device)

    def _use_context(self) -> None:
        """Make torch's context of the device the calling thread's, as the driver's functions need one."""
        torch.cuda.set_device(self._device)
        torch.empty(1, device=self._device)
