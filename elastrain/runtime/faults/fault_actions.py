"""The action of each class of faults on its worker: one table, one short function per class.

An action returns the reason why it could not strike, or "".
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from elastrain.device import DevicePort
from elastrain.device.same_memory import HOST
from elastrain.protocol.agent_messages import ArmFault
from elastrain.runtime.faults.broken_parts import FailingDevice, FailingDrives, Slowness, stall_device
from elastrain.runtime.faults.flips import FrameFlip, MemberMemory, PartialFlip, WrittenFiles

_LARGE_BYTES = 1 << 30
_BEYOND_MIB, _TRIES = 64, 100


@dataclass(kw_only=True)
class Tools:
    """The objects through which fault actions break this worker: its speed, device, drives, results, files, memory."""

    slowness: Slowness = field(default_factory=Slowness)
    device: FailingDevice = field(default_factory=FailingDevice)
    drives: FailingDrives = field(default_factory=FailingDrives)
    partial: PartialFlip = field(default_factory=PartialFlip)
    frame: FrameFlip = field(default_factory=FrameFlip)
    files: WrittenFiles | None = None
    """None if the job writes no checkpoints."""
    memory: MemberMemory | None = None
    """None before the model is prepared."""

    @property
    def port(self) -> DevicePort:
        """The device that computes, or the host before the model is prepared."""
        return HOST if self.memory is None else self.memory.port


@dataclass(frozen=True, kw_only=True)
class Action:
    """The action of one class of faults."""

    strike: Callable[[ArmFault, Tools], str]
    in_loop: bool = False
    """True if only the training loop's thread may carry it out."""
    prepare: Callable[[Tools], None] | None = None
    """A preparation that the engine's thread calls when the fault is armed."""


def _kill(fault: ArmFault, tools: Tools) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _segfault(fault: ArmFault, tools: Tools) -> str:
    _by_default(signal.SIGSEGV)
    ctypes.string_at(0)
    return ""


def _abort(fault: ArmFault, tools: Tools) -> str:
    _by_default(signal.SIGABRT)
    os.abort()


def _by_default(number: int) -> None:
    """Restore the default action of a signal. libc is called, because Python allows that in the main thread only."""
    ctypes.CDLL(None).signal(number, None)


def _raise(fault: ArmFault, tools: Tools) -> str:
    raise RuntimeError(str(fault.options["text"]))


def _fail_device(fault: ArmFault, tools: Tools) -> str:
    tools.device.begin(int(fault.options["after"]), str(fault.options["how"]), tools.port)
    return ""


def _hang(fault: ArmFault, tools: Tools) -> str:
    until_s = time.monotonic() + (math.inf if fault.for_s is None else fault.for_s)
    how = fault.options["how"]
    if how == "device" and not tools.port.is_host:
        return stall_device(tools.port) if fault.for_s is None else "a kernel cannot be ended: leave out --for"
    while (left_s := until_s - time.monotonic()) > 0:
        if how == "lock":  # PyDLL keeps the interpreter lock during the call: no thread of this process runs Python
            ctypes.PyDLL(None).usleep(int(1e6 * min(left_s, 1000.0)))  # its argument has 32 bits
        elif how in ("forward", "device"):
            time.sleep(min(left_s, 1000.0))
    return ""


def _slow(fault: ArmFault, tools: Tools) -> str:
    tools.slowness.begin(float(fault.options["factor"]), str(fault.options["how"]), fault.for_s)
    return ""


def _stop(fault: ArmFault, tools: Tools) -> str:
    """Stop the process group here. The agent was told, and continues the group after the fault's duration."""
    os.killpg(0, signal.SIGSTOP)
    return ""


def _flip(fault: ArmFault, tools: Tools) -> str:
    bit = int(fault.options["bit"])
    match where := str(fault.options["where"]):
        case "partial":
            tools.partial.ask(bit)
            return ""
        case "frame":
            tools.frame.ask(bit)
            return ""
        case "file":
            return "this job writes no checkpoints" if tools.files is None else tools.files.flip(bit)
        case "spill":
            return tools.drives.flip_next()
        case _ if tools.memory is None:
            return "nothing is held yet"
        case _:
            return tools.memory.flip(where, bit)


def _fail_drive(fault: ArmFault, tools: Tools) -> str:
    return tools.drives.begin(str(fault.options["how"]), 1e6 * float(fault.options["rate"]), fault.for_s)


def _limit_memory(fault: ArmFault, tools: Tools) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    torch.empty(_LARGE_BYTES, dtype=torch.uint8)  # raises, as any allocation does that needs new pages
    return ""


def _exhaust_memory(fault: ArmFault, tools: Tools) -> str:
    """Allocate more than the limit that the agent sets for this worker, so that the kernel kills the process."""
    held = []
    for _ in range(_TRIES):
        if "elastrain-out-of-memory" in Path("/proc/self/cgroup").read_text():
            held.append(torch.ones(int((1 << 20) * (float(fault.options["room"]) + _BEYOND_MIB)), dtype=torch.uint8))
        time.sleep(0.02)
    return "the agent could set no limit, or the kernel does not kill for it"


ACTIONS: Mapping[str, Action] = {
    "kill": Action(strike=_kill),
    "segfault": Action(strike=_segfault),
    "abort": Action(strike=_abort),
    "exception": Action(strike=_raise, in_loop=True),
    "device-error": Action(strike=_fail_device, in_loop=True, prepare=lambda tools: tools.device.expect()),
    "hang": Action(strike=_hang, in_loop=True),
    "slow": Action(strike=_slow, in_loop=True),
    "flip": Action(strike=_flip),
    "drive": Action(strike=_fail_drive),
    "memory-limit": Action(strike=_limit_memory, in_loop=True),
    "stop": Action(strike=_stop),
    "out-of-memory": Action(strike=_exhaust_memory),
}
