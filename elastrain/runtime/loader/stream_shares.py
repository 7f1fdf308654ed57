"""A stream's share of the user's data, as micro-batches without an end, and its state as text.

To a dataset, stream `s` of `S` is loader process `s` of `S` of one machine, so that datasets which share their data out
over torch's loader processes share it out over the streams. A dataset of a list is read whole by its stream. Python,
NumPy and torch are seeded before each sample.
"""

from __future__ import annotations

import copy
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from elastrain.errors import ConfigError
from elastrain.job.batch import stream_key
from elastrain.job.streams import StreamOrder
from elastrain.runtime.loader.loader_arguments import Loading, as_worker
from elastrain.runtime.loader.seeding import seed_all
from elastrain.runtime.loop_state.loop_state_codec import Packer, unpack

_SAMPLE, _BEGIN, _COLLATE = range(3)
"""Purposes of the draws of a stream."""


@dataclass(frozen=True)
class Streamed:
    """The data of all streams, and how it becomes micro-batches."""

    datasets: Any
    """One iterable for all streams, or a list of one for each."""
    order: StreamOrder
    collate: Callable[[list[Any]], Any]
    loading: Loading

    def of(self, stream: int) -> Any:
        """Return the dataset of a stream."""
        return self.datasets[stream] if isinstance(self.datasets, list | tuple) else self.datasets

    def seen_from(self, stream: int) -> AbstractContextManager[None]:
        """Let the dataset see that it is read by loader process `stream` of so many, or by the only one of its own."""
        own = isinstance(self.datasets, list | tuple)
        number, count = (0, 1) if own else (stream, self.order.streams)
        return as_worker(number, count, self.order.seed, self.of(stream))


START: Mapping[str, Any] = {"epoch": 0, "taken": 0, "given": 0, "owner": "", "inner": ""}
"""The place at which a stream begins."""


class StreamShare(IterableDataset[Any]):
    """One stream's share of the data from a place on, as lists of samples without an end."""

    def __init__(self, data: Streamed, stream: int, place: Mapping[str, Any]) -> None:
        self._data, self._stream, self._place = data, stream, place

    def __iter__(self) -> _ShareRows:
        rows = _ShareRows(self._data, self._stream)
        rows.load_state_dict(self._place)
        return rows


class _ShareRows:
    """An iterator over `(number of the micro-batch, its samples)`. Each end of the data begins another epoch."""

    def __init__(self, data: Streamed, stream: int) -> None:
        self._data, self._stream = data, stream
        self._dataset = data.of(stream)
        self._epoch, self._taken, self._given = 0, 0, 0
        """Epoch, samples taken in it, and micro-batches given in all."""
        self._saved: tuple[str, Any] = ("", None)
        """Owner and content of the state with which the epoch goes on."""
        self._rows: Iterator[Any] | None = None

    def __iter__(self) -> _ShareRows:
        return self

    def __next__(self) -> tuple[int, list[Any]]:
        samples: list[Any] = []
        with self._data.seen_from(self._stream):
            while len(samples) < self._data.order.micro_batch_size:
                if self._rows is None:
                    self._rows = self._begun()
                self._seed(self._taken, _SAMPLE)
                try:
                    samples.append(next(self._rows))
                    self._taken += 1
                except StopIteration:
                    self._end_epoch()
                    samples = [] if self._data.order.drop_last else samples
        self._given += 1
        return self._given - 1, samples

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and the data's own state if it has one."""
        owner, inner = self._saved
        for name, thing in (("iterator", self._rows), ("dataset", self._dataset)):
            if self._rows is not None and _is_stateful(thing):
                owner, inner = name, thing.state_dict()  # type: ignore[union-attr] # just checked
                break
        # As text: torchdata merges what changes from state to state, and leaves the ends of lists that became shorter.
        return {
            "epoch": self._epoch,
            "taken": self._taken,
            "given": self._given,
            "owner": owner,
            "inner": encoded(inner) if owner else "",
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the place at the next sample."""
        self._epoch, self._taken, self._given = state["epoch"], state["taken"], state["given"]
        self._saved = (state["owner"], decoded(state["inner"])) if state["owner"] else ("", None)
        self._rows = None

    def _begun(self) -> Iterator[Any]:
        """Begin the epoch, and come to the place in it: by the saved state, or by reading up to there again."""
        owner, inner = self._saved
        self._saved = "", None
        given = self._data.of(self._stream)
        if _is_stateful(given) or hasattr(given, "set_epoch"):  # other streams in this process have other states
            self._dataset = _copied(given)
        if hasattr(given, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        self._seed(self._epoch, _BEGIN)
        if owner == "dataset":
            self._dataset.load_state_dict(inner)
        rows: Any = iter(self._dataset)
        if owner == "iterator":
            rows.load_state_dict(inner)
        for number in range(0 if owner else self._taken):
            self._seed(number, _SAMPLE)
            next(rows, None)  # if the data has become shorter, what comes next differs
        return cast(Iterator[Any], rows)

    def _end_epoch(self) -> None:
        if self._taken < (self._data.order.micro_batch_size if self._data.order.drop_last else 1):
            raise ConfigError(
                f"stream {self._stream} of {self._data.order.streams} has {self._taken} samples in epoch "
                f"{self._epoch}, too few for a micro-batch: use fewer streams, or give each one a share"
            )
        self._epoch, self._taken, self._rows = self._epoch + 1, 0, None

    def _seed(self, number: int, purpose: int) -> None:
        # The epoch is part of the stream's number, so that no two epochs draw alike.
        seed_all(stream_key(self._data.order.seed, self._stream + (self._epoch << 32), number, purpose))


class Collate:
    """The collation of a micro-batch, with draws that depend on its number alone."""

    def __init__(self, data: Streamed, stream: int) -> None:
        self._data, self._stream = data, stream

    def __call__(self, numbered: tuple[int, list[Any]]) -> Any:
        """Return the micro-batch of these samples."""
        number, samples = numbered
        seed_all(stream_key(self._data.order.seed, self._stream, number, _COLLATE))
        return self._data.collate(samples)


def _copied(dataset: Any) -> Any:
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise ConfigError(
            f"{type(dataset).__name__} cannot be copied ({error}), but each stream needs a copy of one with a state "
            "or set_epoch: make what cannot be copied in its __iter__"
        ) from error


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def encoded(state: Any) -> str:
    """Return a state as text. Raises ConfigError if it is no plain data."""
    packer = Packer()
    tree = packer.pack("a stream's state", state)
    raw = b"".join(whole.numpy().tobytes() for whole in packer.payload())
    return json.dumps([tree, b64encode(raw).decode()], separators=(",", ":"))


def decoded(text: str) -> Any:
    """Return the state that `encoded` was given."""
    tree, raw = json.loads(text)
    return unpack(tree, torch.frombuffer(bytearray(b64decode(raw)), dtype=torch.uint8) if raw else None)


def content_digest(batch: Any) -> str:
    """Return a digest of the tensors, arrays, numbers and texts of a batch, whichever process made it."""
    hasher = blake2b(digest_size=8)
    for piece in _pieces(batch):
        hasher.update(piece)
    return hasher.hexdigest()


def _pieces(thing: Any) -> Iterator[bytes]:
    if isinstance(thing, Tensor) and thing.layout is torch.strided and not thing.is_quantized:
        yield f"{thing.dtype}{tuple(thing.shape)}".encode()
        plain = thing.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(thing, np.ndarray) and thing.dtype.kind != "O":
        yield f"{thing.dtype}{thing.shape}".encode()
        yield thing.tobytes()
    elif isinstance(thing, Mapping):
        yield from _pieces(list(thing.items()))
    elif isinstance(thing, list | tuple | np.ndarray):
        yield f"{len(thing)}[".encode()
        for part in thing:
            yield from _pieces(part)
    elif thing is None or isinstance(thing, str | bytes | int | float | complex | np.generic):
        yield repr(thing).encode()
    else:
        yield type(thing).__name__.encode()
        yield from _pieces(vars(thing) if hasattr(thing, "__dict__") and not isinstance(thing, Tensor) else ())
