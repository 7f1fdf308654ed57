"""`save_on_disk`: saved-tensor hooks that hand each activation to the spill manager, and the object that users hold.

Counterpart of `torch.autograd.graph.save_on_cpu`. The hooks decide nothing: `identity.py` describes a tensor, the spill
policy chooses how much leaves, and the residency table says what happens to each storage.
"""

from __future__ import annotations

import atexit
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from elastrain.base import environment
from elastrain.offload.activations.compiled import CompileWatch
from elastrain.offload.activations.deferred import undisturbed
from elastrain.offload.activations.forward_spills import Operator, running_operator
from elastrain.offload.activations.identity import (
    SpillHandle,
    StayingTensor,
    VersionWatch,
    is_part,
    record_of,
    remember,
    stays_because,
    view_of,
)
from elastrain.offload.activations.manager import SpillManager
from elastrain.offload.activations.modules import ModuleTrail, untraced
from elastrain.offload.activations.pass_records import Origin, SpillRecord
from elastrain.offload.activations.spill_policy import Planner, SpillPlan
from elastrain.offload.compiled_runs import KeptValue
from elastrain.offload.drives import gds
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.directories import check_directory
from elastrain.offload.drives.port import HOST_IO, CudaEngine, IoEngine
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.drives.sharing import shared
from elastrain.offload.drives.transfer import hand_over
from elastrain.offload.errors import ModifiedInPlaceError, OffloadConfigError
from elastrain.offload.inputs import directories, whole_bytes
from elastrain.offload.interrupts import Entrance, KeptByItsBlock
from elastrain.offload.planning.profile import Occupancy, OffloadStats, Profile, ProfileFile, default_file

MIN_BYTES = 256 << 10
_MADE = weakref.WeakSet["ActivationOffload"]()


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one offload; see `save_on_disk`. `memory_limit` includes storages that are being moved.

    `run_dir` and `member` are the run folder and the name of a worker of `elastrain run`, or None and "m0". Such a
    worker always writes a profile, and takes turns with the other workers of its node at a drive. `has_tier` is True if
    a tier of host memory lies above the directories, of which there may then be none.
    """

    dirs: tuple[str, ...]
    memory_limit: int | None = None
    quota: int | None = None
    min_bytes: int = MIN_BYTES
    deterministic: bool = True
    threads_per_device: int = 2
    deadline_s: float = 60.0
    gds: bool = False
    profile: str | None = None
    run_dir: Path | None = None
    member: str = "m0"
    has_tier: bool = False

    def __post_init__(self) -> None:
        if not self.dirs and not self.has_tier:
            raise OffloadConfigError("dirs is empty: name at least one directory on an SSD")
        for name in ("memory_limit", "quota"):
            value = getattr(self, name)
            if value is not None and whole_bytes(name, value) <= 0:
                raise OffloadConfigError(f"{name} must be a positive number of bytes, got {value}")
        if self.threads_per_device < 1:
            raise OffloadConfigError(f"threads_per_device must be at least 1, got {self.threads_per_device}")
        for directory in self.dirs:
            check_directory(directory)


def save_on_disk(
    dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    memory_limit: int | None = None,
    quota: int | None = None,
    deterministic: bool = True,
    min_bytes: int = MIN_BYTES,
    threads_per_device: int = 2,
    deadline_s: float = 60.0,
    gds: bool = False,
    profile: str | os.PathLike[str] | None = None,
) -> ActivationOffload:
    """Keep activations on SSD between forward and backward, with the same bits.

    Create one object and enter it around every forward. Measurements of the last passes decide how much the next pass
    spills. Backward may run inside or outside of the `with` block.

    Args:
        dirs: one directory or several, on SSDs.
        memory_limit: bytes of saved activations that may be in memory. None spills as much as the drives can move
            while the step computes.
        quota: bytes on disk, over all directories together; None for no bound.
        deterministic: verify a checksum on every read.
        min_bytes: smaller storages stay in memory.
        threads_per_device: I/O threads for each directory.
        deadline_s: longest wait for a device, in seconds.
        gds: move CUDA tensors by KvikIO: by GPUDirect Storage, or in a compatibility mode where our own pinned copies
            are not faster. Refused if a probe does not read back the bytes that it wrote. `stats().devices` and
            `elastrain offload show` name what moved the bytes.
        profile: file to write for `elastrain offload show`.

    Raises:
        OffloadConfigError: a directory or a size is unfit.
    """
    config = OffloadConfig(
        dirs=directories(dirs),
        memory_limit=memory_limit,
        quota=quota,
        deterministic=deterministic,
        min_bytes=min_bytes,
        threads_per_device=threads_per_device,
        deadline_s=deadline_s,
        gds=gds,
        profile=None if profile is None else os.path.abspath(profile),
        run_dir=environment.run_folder(),
        member=environment.member(),
    )
    return ActivationOffload(config)


class ActivationOffload:
    """A context manager for forwards whose activations are spilled. Reusable, by one thread at a time.

    `engines` replaces the slab files in `config.dirs` (by memory, fault injection, or devices shared with others).
    `plan` replaces the policy that decides what leaves. `describe` adds to the profile what else its owner holds.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        engines: Sequence[IoEngine | Device] | None = None,
        clock: Callable[[], float] = time.monotonic,
        describe: Callable[[Profile], Profile] = lambda profile: profile,
        plan: SpillPlan | None = None,
    ) -> None:
        self.config = config
        self._describe = describe
        self._engines = engines
        self._clock = clock
        self._planner: SpillPlan = plan or Planner(config.memory_limit)
        self._manager: SpillManager | None = None
        self._opening = threading.Lock()
        self._compile_watch = CompileWatch()
        self._trail = ModuleTrail()
        self.entrance = Entrance()
        self._closed = False
        _MADE.add(self)
        file = default_file(config.run_dir, config.member) if config.profile is None else Path(config.profile)
        self._profile = ProfileFile(file, clock)
        if file is not None:
            atexit.register(_write_last_profile, weakref.ref(self))

    def __enter__(self) -> ActivationOffload:
        if self.entrance.is_entered:
            raise OffloadConfigError("this offload is entered already: make a second one to nest them")
        manager = self._open()
        self._profile.offer(self.profile)
        manager.begin_pass()
        self._compile_watch.begin()
        try:
            self.entrance.enter(untraced(self._pack), untraced(self._unpack), self._kept)
            return self
        except BaseException:
            self.entrance.leave()
            raise

    @KeptByItsBlock
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        manager = self._manager
        assert manager is not None
        self.entrance.leave()
        try:
            self._compile_watch.end(error)
        except BaseException:
            manager.end_forward(quietly=True)
            raise
        manager.end_forward(quietly=error is not None)
        if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
            raise OffloadConfigError(
                "torch.func.grad, vjp, jacrev and hessian forbid hooks on saved tensors, so that they cannot run in "
                "the `with` block of save_on_disk: call them before it or after it"
            ) from error

    def stats(self) -> OffloadStats:
        """Return the measurements so far."""
        return self._open().stats()

    @property
    def live_bytes(self) -> int:
        """Bytes of memory that saved storages take now."""
        return 0 if self._manager is None else self._manager.live_bytes

    @property
    def manager(self) -> SpillManager:
        """The spill manager, which owns the saved storages."""
        return self._open()

    def set_memory_limit(self, limit_bytes: int) -> None:
        """Set another limit, in bytes. The next saved storage makes room under it. Safe from any thread."""
        if limit_bytes <= 0:
            raise OffloadConfigError(f"memory_limit must be a positive number of bytes, got {limit_bytes}")
        self._open().set_limit(limit_bytes)

    def profile(self) -> Profile:
        """Return the measurements, where the data lies, and the host name, as `elastrain offload show` reads them."""
        stats = self.stats()
        spilled_bytes = sum(device.used_bytes for device in stats.devices)
        place = Occupancy(what="saved activations", memory_bytes=stats.live_bytes, disk_bytes=spilled_bytes)
        return self._describe(Profile(stats=stats, places=(place,), reason=stats.amount, host=platform.node()))

    @undisturbed
    def close(self) -> None:
        """End the threads and give the disk space back. Saved activations cannot be read any more."""
        if self._manager is not None and not self._closed:
            self._closed = True
            self._profile.write(self.profile)
            self._manager.close()

    def _open(self) -> SpillManager:
        if self._manager is None or self._manager.pid != os.getpid():
            self._open_manager()
        assert self._manager is not None
        return self._manager

    @undisturbed
    def _open_manager(self) -> None:
        with self._opening:  # another thread may set a limit while the first forward begins
            if self._manager is None or self._manager.pid != os.getpid():
                self._manager = SpillManager(
                    self._open_devices(),
                    limit_bytes=self.config.memory_limit,
                    plan=self._planner,
                    deadline_s=self.config.deadline_s,
                    clock=self._clock,
                )

    def _open_devices(self) -> list[Device]:
        engines = self._engines if self._engines is not None else [self._engine_in(each) for each in self.config.dirs]
        quota = self.config.quota
        return [
            engine
            if isinstance(engine, Device)
            else Device(
                engine,
                quota_bytes=None if quota is None else quota // len(engines),
                threads=self.config.threads_per_device,
                checked=self.config.deterministic,
                clock=self._clock,
            )
            for engine in engines
        ]

    def _engine_in(self, directory: str) -> IoEngine:
        engine = gds.open_engine(directory) if self.config.gds else PosixEngine(directory)
        return engine if isinstance(engine, CudaEngine) else shared(engine, directory, self.config.run_dir)

    def _pack(self, tensor: torch.Tensor, is_a_part: bool | None = None) -> StayingTensor | SpillHandle:
        """Save a tensor.

        For an alias that does not know its base tensor, `is_a_part` gives the base's result of `is_part`.
        """
        module = self._trail.innermost()
        self._compile_watch.check(module)
        return self._take(tensor, module, running_operator(), is_a_part)

    def _keep(self, value: torch.Tensor) -> StayingTensor | SpillHandle:
        """Save a value of a compiled program. It is final, so that it may leave at once."""
        return self._take(value, "a compiled program", running_operator(fills=False))

    def _kept(self, value: torch.Tensor) -> KeptValue:
        saved = self._keep(value)
        return KeptValue(bring=lambda: self._unpack(saved))

    def _take(
        self, tensor: torch.Tensor, module: str, operator: Operator, pinned: bool | None = None
    ) -> StayingTensor | SpillHandle:
        # Tensors saved during a backward (by recomputation, or for a second derivative) are used soon: they stay.
        if torch._C._current_graph_task_id() != -1 or (
            pinned is None and stays_because(tensor, min_bytes=self.config.min_bytes)
        ):
            return StayingTensor(tensor, module)
        manager = self._open()
        view, pinned = view_of(tensor), is_part(tensor) if pinned is None else pinned
        watch = VersionWatch(tensor, module) if operator.fills else None  # programs never change saved values
        # `save` wakes an I/O thread that waits for the GIL. No call of torch, which would release the GIL, may follow.
        storage, record, handle = tensor.untyped_storage(), record_of(tensor, pinned=pinned), SpillHandle(view, watch)
        if record is None or not manager.share(record, storage, handle, operator):
            origin = Origin(storage, version=tensor._version, dtype=str(tensor.dtype), module=module, pinned=pinned)
            record = SpillRecord(storage, origin)
            manager.save(record, handle, operator)
            remember(tensor, record)
        handle.record = record
        return handle

    def _unpack(self, saved: StayingTensor | SpillHandle) -> torch.Tensor:
        if isinstance(saved, StayingTensor):
            return saved.tensor()
        if saved.watch is not None:
            saved.watch.check()
        storage = self._open().need(saved.record)
        if storage.nbytes() < saved.record.size_bytes:
            raise ModifiedInPlaceError(
                f"the memory of a tensor saved for backward in {saved.record.origin.module} was resized from "
                f"{saved.record.size_bytes} to {storage.nbytes()} bytes: fill it again before backward needs it"
            )
        hand_over(storage)
        tensor = saved.view.of(storage)
        return tensor if saved.watch is None else saved.watch.watched(tensor)


def tell_moved(log: Callable[..., None]) -> None:
    """Log what offloads of this process have moved to each drive or host tier, and what moved the bytes."""
    managers = [each._manager for each in _MADE if each._manager is not None and each._manager.pid == os.getpid()]
    for used in (used for manager in managers for used in manager.stats().devices if used.written_bytes):
        moved = {"written_bytes": used.written_bytes, "read_bytes": used.read_bytes}
        log("activations_moved", to=used.name, by=used.moved_by or HOST_IO, **moved)


def _write_last_profile(offload: weakref.ref[ActivationOffload]) -> None:
    """Write the profile at the end of a process that did not close the offload."""
    left = offload()
    if left is not None and left._manager is not None and not left._closed:
        left._profile.write(left.profile)
