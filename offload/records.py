"""What the manager knows of each saved storage: plain holders. The manager's lock guards all but `Origin`."""

from __future__ import annotations

import weakref

import torch

from elastrain.offload.deferred import Watched
from elastrain.offload.device import Copy, Device
from elastrain.offload.errors import OffloadError
from elastrain.offload.queue import IoRequest
from elastrain.offload.residency import State
from elastrain.offload.stats import Lifetime, Path
from elastrain.offload.transfer import ready_event


class Origin:
    """What was saved: never changes."""

    __slots__ = ("device", "dtype", "memory", "module", "pinned", "version")

    def __init__(self, storage: torch.UntypedStorage, *, version: int, dtype: str, module: str, pinned: bool) -> None:
        self.device = storage.device
        # The forward's own memory may live on with somebody else: then nothing has to be read.
        self.memory = weakref.ref(storage)
        self.version = version
        self.dtype = dtype
        self.module = module
        self.pinned = pinned

    @property
    def kind(self) -> str:
        """What compresses alike: the dtype and the type of module, which the trail gives as "name (Type)"."""
        return f"{self.dtype} {self.module.rpartition('(')[2].rstrip(')')}"


class DiskSide:
    """A storage's dealings with a device: the request under way, the copy that is there, what went wrong."""

    __slots__ = ("compared", "copy", "device", "fault", "newer", "request", "was_written")

    def __init__(self) -> None:
        self.device: Device | None = None
        self.request: IoRequest | None = None
        self.copy: Copy | None = None
        self.fault: OffloadError | None = None
        self.was_written = False
        # How often the memory was to be compared with the copy: a write that ends looks whether that has changed.
        self.compared = 0
        # The memory that counts instead of an outdated copy, as long as that copy is still being read.
        self.newer: torch.UntypedStorage | None = None


class Timing:
    """When things happened to a storage, in seconds since its pass began, and how it came back."""

    __slots__ = ("index", "needed_s", "path", "released_s", "saved_s", "stalled_s", "waited_s")

    def __init__(self) -> None:
        self.index = -1
        self.path = Path.UNUSED
        self.saved_s = self.stalled_s = self.released_s = self.waited_s = 0.0
        self.needed_s: float | None = None


class SpillRecord:
    """One saved storage of one pass."""

    __slots__ = (
        "__weakref__",
        "disk",
        "handles",
        "held",
        "origin",
        "ready",
        "size_bytes",
        "state",
        "storage",
        "timing",
        "turn",
        "wants_to_leave",
        "watched",
    )

    def __init__(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        self.size_bytes = storage.nbytes()
        self.origin = origin
        self.state = State.PINNED if origin.pinned else State.RESIDENT
        self.storage: torch.UntypedStorage | None = storage
        self.ready = ready_event(storage)
        self.disk = DiskSide()
        self.timing = Timing()
        self.watched: list[Watched] = []
        # Graph nodes that may still ask for it.
        self.handles = set[Watched]()
        # Operators that may still fill it: no copy of it would be good.
        self.held = 0
        self.wants_to_leave = False
        # When backward will ask for it, as far as is known; the highest turn comes first.
        self.turn = -1

    def lifetime(self) -> Lifetime:
        """What happened to it, as a value."""
        timing = self.timing
        return Lifetime(
            index=timing.index,
            size_bytes=self.size_bytes,
            dtype=self.origin.dtype,
            module=self.origin.module,
            saved_s=timing.saved_s,
            needed_s=timing.needed_s,
            released_s=timing.released_s,
            path=timing.path,
            waited_s=timing.waited_s,
            stalled_s=timing.stalled_s,
        )
