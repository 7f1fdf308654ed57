"""The readers of streams: each a `StatefulDataLoader` of torchdata, which reads in a process of its own or here."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import signal_handling

from elastrain.base.environment import tell_one_machine
from elastrain.errors import ConfigError
from elastrain.job.streams import StreamMark, StreamOrder
from elastrain.runtime.loader.fork_server import die_with
from elastrain.runtime.loader.loader_arguments import Loading
from elastrain.runtime.loader.seeding import generators_kept
from elastrain.runtime.loader.stream_readers import ReaderEndedError, StreamReaders
from elastrain.runtime.loader.stream_shares import (
    START,
    Collate,
    Streamed,
    StreamShare,
    content_digest,
    decoded,
    encoded,
)

CLOSE_WAIT_S = 0.3
"""Time that a closed reader's process gets to finish the sample that it reads."""
_open: WeakSet[StreamReader] = WeakSet()


class StreamReader:
    """A reader of one stream; see `stream_readers.OrderedReader`."""

    def __init__(
        self, data: Streamed, stream: int, mark: StreamMark | None, *, is_exact: bool, tell: Callable[[str], None]
    ) -> None:
        loading = data.loading
        self._is_apart = loading.num_workers > 0
        apart = {"prefetch_factor": loading.prefetch, "multiprocessing_context": "fork"} if self._is_apart else {}
        place = START if mark is None else decoded(mark.state)
        if not (is_exact and place["owner"]):
            place = {**place, "owner": "", "inner": ""}
            if place["taken"]:
                again = f"{place['taken']} samples of its epoch"
                tell(f"stream {stream} of {data.order.streams} is read again up to its place, {again}")
        with warnings.catch_warnings(action="ignore"):  # torchdata calls something that torch has deprecated
            self._loader = stateful_loader()(
                StreamShare(data, stream, place),
                batch_size=None,
                num_workers=loading.num_workers,
                collate_fn=Collate(data, stream),
                timeout=loading.timeout_s if self._is_apart else 0,
                worker_init_fn=_Entered(data, stream) if self._is_apart else None,
                generator=torch.Generator(),
                **apart,
            )
        self._iterator: Any = None
        given = data.of(stream)
        self._warn: Callable[[], None] | None = None
        """Says, once in a job, that the data has neither a state nor a length."""
        if mark is None and not hasattr(given, "__len__") and (stream == 0 or given is not data.of(0)):
            self._warn = lambda: tell(
                f"stream {stream} of {data.order.streams} ({type(given).__name__}) has neither a state (state_dict and "
                "load_state_dict) nor a length: who takes it over reads its epoch again from the start, and without an "
                "end that takes longer and longer"
            )
        self._stream, self._owner = stream, os.getpid()
        atexit.register(self._kill)
        _open.add(self)

    def state(self) -> str:
        """Return the state in front of the micro-batch that `next` gives, whatever was read ahead."""
        with generators_kept(), self._watched():
            # Only the share's part: the rest depends on the number of processes.
            place = _place(self._loader.state_dict())
        if self._warn is not None and place["taken"] and not place["owner"]:
            self._warn()
            self._warn = None
        return encoded(place)

    def next(self) -> Any:
        """Return the next micro-batch."""
        with generators_kept(), self._watched():
            if self._iterator is None:
                self._iterator = iter(self._loader)
            return next(self._iterator)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise ReaderEndedError if the reader's process ends while the body waits for it, or has ended before.

        Outside of such bodies, torch must not know the process: its handler of SIGCHLD raises anywhere in the script.
        """
        try:
            if self._is_apart and (running := self._loader._iterator) is not None:
                signal_handling._set_worker_pids(id(running), tuple(each.pid for each in running._workers))  # type: ignore[attr-defined]
                running._worker_pids_set = True
                if not all(each.is_alive() for each in running._workers):  # what it wrote last may be half a message
                    raise ReaderEndedError(f"the process that reads stream {self._stream} has ended")
            yield
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            raise ReaderEndedError(f"stream {self._stream}: {str(error).partition(chr(10))[0].strip(' .')}") from error
        finally:
            running = self._loader._iterator
            if self._is_apart and running is not None and running._worker_pids_set:
                signal_handling._remove_worker_pids(id(running))  # type: ignore[attr-defined]
                running._worker_pids_set = False

    def close(self) -> None:
        """Drop all that was read ahead, and end the process, by force if it is still reading after a moment."""
        atexit.unregister(self._kill)
        _open.discard(self)
        if self._is_apart and self._loader._iterator is not None:
            force = threading.Timer(CLOSE_WAIT_S, self._kill)
            force.start()
            self._loader._iterator._shutdown_workers()  # not when it is collected, which may be in a fork
            force.cancel()
            force.join()
        self._iterator = None
        del self._loader

    def leave_alone(self) -> None:
        """Keep a fork of this process from ending the reader's process when it drops its copy of the reader."""
        if self._loader._iterator is not None:
            self._loader._iterator._shutdown = True

    def _kill(self) -> None:
        if self._owner != os.getpid():
            return
        for worker in getattr(self._loader._iterator, "_workers", ()):
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


class StreamSource:
    """A source of micro-batches that reads streams. Its state, the committed marks, is part of the loop's state."""

    def __init__(self, data: Streamed, order: StreamOrder) -> None:
        self.tell: Callable[[str], None] = lambda sentence: None
        self.readers = StreamReaders(
            order,
            lambda stream, mark, is_exact: StreamReader(data, stream, mark, is_exact=is_exact, tell=self._tell),
            content_digest,
            self._tell,
        )

    def _tell(self, sentence: str) -> None:
        self.tell(sentence)

    def get(self, request: tuple[int, int]) -> Any:
        """Return a micro-batch."""
        return self.readers.read(*request)

    def close(self) -> None:
        """Close all readers."""
        self.readers.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the committed marks."""
        return {"marks": {stream: asdict(mark) for stream, mark in sorted(self.readers.marks.items())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these marks."""
        self.readers.start_from({stream: StreamMark(**mark) for stream, mark in state["marks"].items()})


def check_dataset(dataset: Any, streams: Any, loading: Loading) -> None:
    """Raise ConfigError unless the dataset can be read by index, or as this many streams if they are given."""
    if streams is not None:
        _check_streamed(dataset, streams, loading)
    elif isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            "the dataset must be map-style (__getitem__ and __len__), so that any member can load any sample; got "
            f"{type(dataset).__name__}: data that can only be read in order needs streams=…"
        )


def _check_streamed(dataset: Any, streams: Any, loading: Loading) -> None:
    if not isinstance(streams, int) or isinstance(streams, bool) or streams < 1:
        raise ConfigError(f"streams must be a whole number of at least 1; got {streams!r}")
    if loading.num_workers > 1:
        raise ConfigError(
            f"num_workers={loading.num_workers} with streams={streams}: each stream is read by one process (1) or in "
            "the training process (0); more streams read more at once"
        )
    parts = dataset if isinstance(dataset, list | tuple) else [dataset]
    if len(parts) not in (1, streams) or (len(parts) < streams and isinstance(dataset, list | tuple)):
        raise ConfigError(f"{len(parts)} datasets were given for streams={streams}: give one for each, or one for all")
    for part in parts:
        name = type(part).__name__
        if hasattr(part, "__next__") or not hasattr(part, "__iter__"):
            raise ConfigError(
                f"a stream's dataset must be an object whose iter() begins anew, such as an IterableDataset; got {name}"
                + (", which can be read only once" if hasattr(part, "__next__") else "")
            )
        if hasattr(part, "__getitem__") and hasattr(part, "__len__") and not isinstance(part, IterableDataset):
            raise ConfigError(f"{name} is map-style, so it is loaded by index: leave streams={streams} out")
    stateful_loader()


def stateful_loader() -> Any:
    """Return torchdata's `StatefulDataLoader`. Raises ConfigError if it is not installed."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise ConfigError(f"streams need torchdata ({error}): pip install 'elastrain[streams]'") from None
    return StatefulDataLoader


class _Entered:
    """The start of a stream's process. It ends with the member, and its libraries see one machine."""

    def __init__(self, data: Streamed, stream: int) -> None:
        self._data, self._stream, self._parent = data, stream, os.getpid()

    def __call__(self, number: int) -> None:
        die_with(self._parent)
        for reader in _open:
            reader.leave_alone()
        tell_one_machine()
        if (init := self._data.loading.worker_init_fn) is not None:
            with self._data.seen_from(self._stream):
                init(self._stream)


def _place(state: Any) -> dict[str, Any]:
    """Return the state of a share within that of its loader."""
    if isinstance(state, Mapping):
        if {"taken", "given", "owner"} <= set(state):
            return dict(state)
        state = list(state.values())
    found = (_place(part) for part in state) if isinstance(state, list | tuple) else ()
    return next((each for each in found if each), {})
