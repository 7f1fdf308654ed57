"""The accelerator of this member: its choice, its name and UUID, its errors, and torch's deterministic algorithms.

Everything about the device is asked while it works. After an error, only what is known here is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from socket import gethostname

import torch

from elastrain.base.environment import cublas_config, set_cublas_config
from elastrain.base.told_devices import CUBLAS_CONFIG, CUBLAS_CONFIG_DEFAULT, ToldDevices
from elastrain.device import DeviceDescription, device_count, device_of, is_accelerator
from elastrain.errors import ConfigError, ElastrainError
from elastrain.memory.memory_budget import mib
from elastrain.protocol import agent_messages as am

_CUBLAS_CONFIGS = (CUBLAS_CONFIG_DEFAULT, ":16:8")
"""Values with which cuBLAS computes deterministically."""
_LIBRARIES = r"CUDA|HIP|XPU|NPU|cuDNN|MIOpen|hipBLAS|cuBLAS|cuSOLVER|cuFFT|cuSPARSE"
_STATUS = r"\b(CUDNN|CUBLAS|CUSOLVER|CUFFT|CUSPARSE)_STATUS_\w+|\b(UR_RESULT|PI)_ERROR_\w+|\bTriton Error \["
_GONE = re.compile(r"No \w+ GPUs are available|driver initialization failed|unknown error")
"""Errors of a device that is no longer there, if there was one."""
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
_NO_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


class MemberDevice:
    """The knowledge that this process has of its accelerator. Nothing here touches the device after `take`."""

    def __init__(self, told: ToldDevices, slot: int | None, *, deterministic: bool) -> None:
        self.name = ""
        """Name and UUID for people and agents; "" for a member on the CPU, and if nothing is known yet."""
        self._told, self._slot, self._deterministic = told, slot, deterministic
        self._kind = ""
        self._capacity_bytes = self._model_bytes = 0
        self._cublas_is_late = False

    def choose(self) -> None:
        """Make the device of this worker's slot the current one, unless the script has chosen a device before.

        The device with index 0 is current without a call, so a process that does not use it starts no driver.
        """
        count = device_count()
        if not count:
            seen, slot = len(self._told.seen), self._slot or 0
            if seen:  # they were there for an earlier worker: an error that follows is theirs
                self.name = self._told.name_of(self._told.choose(seen, slot) or 0)
            return
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        self._kind, module = accelerator.type, torch.get_device_module(accelerator)
        has_started = bool(getattr(module, "is_initialized", bool)())
        if self._kind == "cuda" and self._deterministic and cublas_config() is None:
            self._cublas_is_late = has_started
            set_cublas_config(CUBLAS_CONFIG_DEFAULT)
        if has_started and (index := int(module.current_device())):
            self._name_by(index)
        elif self._slot is not None:
            if self._told.left_out and not self._told.seen:
                self._told = ToldDevices(seen=_all_of(self._kind), left_out=self._told.left_out)
            index = self._told.choose(count, self._slot) or 0
            self._name_by(index)
            if index:
                torch.accelerator.set_device_index(index)

    def _name_by(self, index: int) -> None:
        self.name = self._told.name_of(index) or f"{self._kind}:{index} of {gethostname()}"

    def take(self, model: torch.nn.Module, say: Callable[[am.OnDevice], None]) -> None:
        """Describe the model's device, tell the agent, and turn on deterministic algorithms. Does nothing on the CPU.

        Raises ConfigError if cuBLAS was not told in time to be deterministic.
        """
        tensors = [*model.parameters(), *model.buffers()]
        device = next((each.device for each in tensors), torch.device("cpu"))
        if not is_accelerator(device):
            self.name = ""
            return
        port = device_of(device)
        described = port.describe()
        self.name, self._kind = _named(described), described.type
        self._capacity_bytes = port.mem_get_info()[1]
        self._model_bytes = sum(each.nbytes for each in tensors)
        if self._deterministic:
            if self._kind == "cuda" and torch.version.cuda:
                self._check_cublas()
            if not torch.are_deterministic_algorithms_enabled():
                torch.use_deterministic_algorithms(True)
        say(am.OnDevice(device=self.name, seen=_all_of(self._kind)))

    def _check_cublas(self) -> None:
        found, ways = cublas_config(), " or ".join(_CUBLAS_CONFIGS)
        otherwise = "or call elastrain.init(deterministic=False)"
        if self._cublas_is_late:
            raise ConfigError(
                f"CUDA had started before elastrain.init(), too late to set {CUBLAS_CONFIG}={CUBLAS_CONFIG_DEFAULT}: "
                f"set it before the script starts, call init() before the script uses the device, {otherwise}"
            )
        if found not in _CUBLAS_CONFIGS:
            raise ConfigError(
                f"{CUBLAS_CONFIG} is {found!r}, and cuBLAS gives the same bits at each call with {ways} only: set one "
                f"of them before the script starts, {otherwise}"
            )

    def error_in(self, error: BaseException) -> BaseException | None:
        """Return the device's error that this exception is, or by which it was caused; None if there is none."""
        seen: BaseException | None = None if isinstance(error, ElastrainError) else error
        for _ in range(16):  # a chain may have a loop
            if seen is None or self._is_devices(seen):
                return seen
            seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
        return None

    def _is_devices(self, error: BaseException) -> bool:
        if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
            return True
        if not isinstance(error, RuntimeError):
            return False
        text, kinds = str(error), _LIBRARIES + (f"|{re.escape(self._kind)}" if self._kind else "")
        told = re.search(rf"\b({kinds})( \w+)? (error|failure):|{_STATUS}", text, re.IGNORECASE)
        return told is not None or (bool(self._told.seen) and _GONE.search(text) is not None)

    def name_or_unknown(self) -> str:
        """Return the device's name, also if the error came before the device was described."""
        return self.name or f"a device of {gethostname()}"

    def signature(self, error: BaseException) -> str:
        """Return type and text of a device's error without what differs between devices and processes."""
        text = str(error).partition("\n")[0]
        for own in (self.name, self.name.rpartition("(")[2].removesuffix(")").removeprefix("UUID ")):
            text = text.replace(own, "the device") if own else text
        if isinstance(error, torch.OutOfMemoryError):
            text = text.partition(".")[0]  # figures of this moment follow
        return f"{type(error).__name__}: {_NUMBER.sub('#', text)}"

    def words(self, error: BaseException, member: str) -> str:
        """Return a sentence about a device's error, which names the device."""
        name = self.name_or_unknown()
        if not isinstance(error, torch.OutOfMemoryError):
            return f"{name} has failed in {member}: this process does not use it any more, and ends"
        limit = f"it has {mib(self._capacity_bytes)}, of which " if self._capacity_bytes else ""
        return (
            f"{name} has no memory left for {member}: {limit}{self._held()}. Use smaller micro-batches, checkpoints of "
            "activations, a smaller run_length or more members, and let fewer processes share the device"
        )

    def _held(self) -> str:
        held_bytes = peak_bytes = 0
        if self._kind:  # figures of the allocator of this process: the device is not asked
            with suppress(Exception):
                module = torch.get_device_module(self._kind)
                held_bytes, peak_bytes = module.memory_allocated(), module.max_memory_allocated()
        return (
            f"this process's tensors hold {mib(held_bytes)} (at most {mib(peak_bytes)} so far), "
            f"{mib(self._model_bytes)} of it parameters and buffers, and the rest gradients, optimizer state, "
            "activations and what the script keeps; other processes may hold more"
        )

    def as_input_error(self, error: BaseException) -> BaseException:
        """Return the ConfigError for a kernel without a deterministic form, or else the same exception."""
        if not (isinstance(error, RuntimeError) and self._deterministic and self.name):
            return error
        text, way_out = str(error), "elastrain.init(deterministic=False) lets it compute"
        if found := _NO_FORM.search(text):
            told = f"the kernel {found[1]} has no deterministic form on {self.name}: use another operation; {way_out}"
        elif "CuBLAS" in text and CUBLAS_CONFIG in text:
            told = f"cuBLAS was not told in time to compute deterministically: set {CUBLAS_CONFIG}; {way_out}"
        else:
            return error
        return ConfigError(told).with_traceback(error.__traceback__)


def _named(described: DeviceDescription) -> str:
    if described.uuid:
        return f"{described.name} (UUID {described.uuid})"
    return f"{described.name} ({described.type}:{described.index} of {gethostname()})"


def _all_of(kind: str) -> tuple[str, ...]:
    """Return the devices that this process sees, by index; "" for one that does not answer."""
    names = [""] * device_count()
    for index in range(len(names)):
        with suppress(Exception):  # a device that is broken
            names[index] = _named(device_of(torch.device(kind, index)).describe())
    return tuple(names)
