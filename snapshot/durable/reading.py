"""Reading a checkpoint from one place or several. Every byte is checked.

If one copy of a part is damaged, another copy is read. Torch is imported only when tensors are read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from elastrain.snapshot.durable import state_file
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError
from elastrain.snapshot.durable.manifest import MANIFEST, Manifest, Part, ShardEntry, decode, merged
from elastrain.snapshot.durable.places.port import ReadablePlace, Source
from elastrain.snapshot.durable.publishing import get

if TYPE_CHECKING:
    from torch import Tensor

    from elastrain.snapshot.durable.tensor_sections import Content
    from elastrain.snapshot.shard_state import ShardState

OnBytes = Callable[[int], None]
"""Called after each frame with the number of bytes that it added, in any thread."""
T = TypeVar("T")
Look = Callable[["_Item", Part, Source], T]
"""A check of one copy. It raises CheckpointError if the copy is bad."""
THREADS = min(8, 2 * (os.cpu_count() or 1))
_MANIFEST_BYTES_MAX = 1 << 30


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A shard or an attachment: its name in sentences, and its copies."""

    what: str
    parts: tuple[Part, ...]
    shard: ShardEntry | None = None


class _Counted:
    """A source that reports the number of bytes read."""

    def __init__(self, source: Source, on_bytes: OnBytes) -> None:
        self._source, self._on_bytes = source, on_bytes
        self.size_bytes, self.close = source.size_bytes, source.close

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        self._source.read_into(view, offset_bytes)
        self._on_bytes(view.nbytes)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A visible checkpoint that is open for reading. Several threads may use it."""

    manifest: Manifest
    places: tuple[ReadablePlace, ...]
    on_bytes: OnBytes | None = None

    @staticmethod
    def open(places: Sequence[ReadablePlace], name: str) -> Checkpoint:
        """Open the checkpoint of this name. Its parts may be spread over the places.

        Raises CheckpointError if no place has a readable manifest, and DamagedError if manifests differ.
        """
        found: list[Manifest] = []
        problems: list[CheckpointError] = []
        for place in places:
            try:
                found.append(_read_manifest(place, name))
            except CheckpointError as error:
                problems.append(error)
        if not found:
            raise problems[0] if problems else CheckpointError("no place was named in which to look for a checkpoint")
        if len({manifest.content for manifest in found}) > 1:
            raise DamagedError(f"the manifests of {name} in {_named(places)} differ: they are not of one checkpoint")
        return Checkpoint(manifest=merged(found), places=tuple(places))

    def read_shard(self, index: int) -> ShardState:
        """Return the state of one shard, in new memory. Its checksums and its digest were checked.

        Raises DamagedError if every copy is damaged, and CheckpointError if these places have none. The text names each
        copy.
        """
        from elastrain.snapshot.shard_state import ShardState

        return ShardState.unpack(*self._first_good(_shard(self.manifest.shards[index]), _content))

    def read_shards(self, indices: Iterable[int]) -> Iterator[ShardState]:
        """Read several shards by several threads, and yield them in order. Raises as `read_shard`."""
        return _in_threads(partial(self.read_shard, index) for index in indices)

    def read_parameters(self, indices: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield index and parameters of several shards in order. Checksums are checked, digests are not.

        Reads no optimizer state. Raises as `read_shard`.
        """
        wanted = list(indices)
        yield from zip(wanted, _in_threads(partial(self._parameters, index) for index in wanted), strict=True)

    def _parameters(self, index: int) -> Tensor:
        return self._first_good(_shard(self.manifest.shards[index]), _parameters)

    def read_attachment(self, name: str) -> tuple[str, list[Tensor]]:
        """Return text and tensors of an attachment. Raises as `read_shard`."""
        if name not in self.manifest.attachments:
            raise CheckpointError(f"{self.manifest.name} in {_named(self.places)} has no {name!r}")
        text, tensors = self._first_good(_Item(what=repr(name), parts=self.manifest.attachments[name]), _content)
        return text.decode(errors="replace"), tensors

    def damaged(self, *, is_thorough: bool) -> dict[str, str]:
        """Return each file in these places that has an unreadable part, with a sentence. No torch.

        With `is_thorough`, all bytes are read; else only sizes and descriptions are checked.
        """
        look: Look[object] = _sums if is_thorough else _glance
        copies = [(item, *copy) for item in self._all_items() for copy in self._copies_here(item)]
        told = _in_threads(partial(self._trouble, item, part, place, look) for item, part, place in copies)
        return {part.file: problem for (_, part, _), problem in zip(copies, told, strict=True) if problem}

    def lacking(self) -> list[str]:
        """Return the names of shards and attachments without a copy in these places."""
        return [item.what for item in self._all_items() if not self._copies_here(item)]

    def look(self) -> list[str]:
        """Return problems that files, sizes and descriptions show, as sentences. No frame is read.

        A bad copy is a problem only if no copy is good. `lacking` tells which parts lie only on other nodes.
        """
        return [problem for item in self._items() for problem in self._against(item, _glance)]

    def verify(self, *, every_copy: bool = True, digests: bool = True) -> list[str]:
        """Read the whole checkpoint, and return damaged or missing parts as sentences.

        Parts that lie only on other nodes are no problem here; see `lacking`.

        Args:
            every_copy: Report a damaged copy even if another copy is good.
            digests: Compare the digests of shards too, which needs torch. Without it, only checksums are compared.
        """
        look: Look[object] = _content if digests else _sums
        looks = (partial(self._problems if every_copy else self._against, item, look) for item in self._items())
        return [problem for found in _in_threads(looks) for problem in found]

    def size_of(self, shards: Collection[int], parameters_of: Iterable[int] = ()) -> int:
        """Return the bytes to read for whole `shards`, and for the parameters alone of `parameters_of`.

        Parameters are counted uncompressed, so their files may be smaller.
        """
        entries = self.manifest.shards
        whole = sum(entries[index].parts[0].size_bytes for index in shards)
        return whole + sum(
            entries[index].numel * state_file.ITEM_BYTES[entries[index].dtype] for index in parameters_of
        )

    @property
    def size_here_bytes(self) -> int:
        """Bytes of all copies in these places."""
        return sum(part.size_bytes for item in self._all_items() for part, _ in self._copies_here(item))

    @cached_property
    def _where(self) -> dict[str, list[ReadablePlace]]:
        """File -> places that have it."""
        found: dict[str, list[ReadablePlace]] = {}
        for place in self.places:
            for file in self._names_in(place):
                found.setdefault(file, []).append(place)
        return found

    def _names_in(self, place: ReadablePlace) -> list[str]:
        """Return the files of the checkpoint in one place.

        If one of several disks is gone, it counts as empty: other disks may have copies, and missing parts are reported
        later.
        """
        try:
            return place.names(self.manifest.name)
        except CheckpointError:
            if len(self.places) == 1:
                raise
            return []

    def _items(self) -> list[_Item]:
        found = self._all_items()
        return [item for item in found if self._copies_here(item)] if self.manifest.is_spread else found

    def _all_items(self) -> list[_Item]:
        others = [_Item(what=repr(name), parts=parts) for name, parts in self.manifest.attachments.items()]
        return [*map(_shard, self.manifest.shards), *others]

    def _copies(self, item: _Item) -> list[tuple[Part, ReadablePlace]]:
        """Return the copies of an item in these places. Raises CheckpointError if there are none."""
        found = self._copies_here(item)
        if not found:
            files = ", ".join(part.file for part in item.parts) or "no file"
            raise CheckpointError(f"{item.what} of {self.manifest.name} is missing: {files} in {_named(self.places)}")
        return found

    def _copies_here(self, item: _Item) -> list[tuple[Part, ReadablePlace]]:
        return [(part, place) for part in item.parts for place in self._where.get(part.file, ())]

    def _first_good(self, item: _Item, look: Look[T]) -> T:
        problems: list[CheckpointError] = []
        for part, place in self._copies(item):
            try:
                return self._at(item, part, place, look)
            except CheckpointError as error:
                problems.append(error)
        told = "; ".join(str(problem) for problem in problems)
        raise DamagedError(f"{self.manifest.name}: {told}")

    def _at(self, item: _Item, part: Part, place: ReadablePlace, look: Look[T]) -> T:
        source = place.open(f"{self.manifest.name}/{part.file}")
        if self.on_bytes is not None:
            source = _Counted(source, self.on_bytes)
        try:
            return look(item, part, source)
        finally:
            source.close()

    def _against(self, item: _Item, look: Look[object]) -> list[str]:
        """Return the problems of an item if all its copies are bad, else nothing."""
        problems = self._problems(item, look)
        copies = sum(len(self._where.get(part.file, ())) for part in item.parts)
        return problems if len(problems) >= copies else []

    def _problems(self, item: _Item, look: Look[object]) -> list[str]:
        try:
            copies = self._copies(item)
        except CheckpointError as error:
            return [str(error)]
        told = [(place, self._trouble(item, part, place, look)) for part, place in copies]
        return [f"{self.manifest.name} in {place.location}: {problem}" for place, problem in told if problem]

    def _trouble(self, item: _Item, part: Part, place: ReadablePlace, look: Look[object]) -> str:
        """Return the problem of this copy, or an empty text."""
        try:
            self._at(item, part, place, look)
        except CheckpointError as error:
            return str(error)
        return ""


def _shard(entry: ShardEntry) -> _Item:
    return _Item(what=f"shard {entry.index}", parts=entry.parts, shard=entry)


def _glance(item: _Item, part: Part, source: Source) -> None:
    state_file.read_tail(source, part, item.what)


def _sums(item: _Item, part: Part, source: Source) -> None:
    state_file.check(source, part, item.what)


def _content(item: _Item, part: Part, source: Source) -> Content:
    # Imported late, because the launcher checks checkpoints without torch.
    from elastrain.snapshot.durable import tensor_sections

    content = tensor_sections.read(source, part, item.what)
    if item.shard is not None:
        tensor_sections.check_state(item.shard, part, content)
    return content


def _parameters(item: _Item, part: Part, source: Source) -> Tensor:
    from elastrain.snapshot.durable import tensor_sections

    assert item.shard is not None
    return tensor_sections.check_parameters(item.shard, part, tensor_sections.read_first(source, part, item.what))


def _read_manifest(place: ReadablePlace, name: str) -> Manifest:
    path = f"{name}/{MANIFEST}"
    manifest = decode(get(place, path, at_most_bytes=_MANIFEST_BYTES_MAX), f"{place.location}/{path}")
    if manifest.name != name:
        raise DamagedError(f"{place.location}/{path} is the manifest of {manifest.name}: it was moved")
    return manifest


def _named(places: Sequence[ReadablePlace]) -> str:
    return " and ".join(place.location for place in places)


def _in_threads(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of tasks in their order.

    Only a few tasks are started before their results are taken, so that memory stays bounded.
    """
    rest = iter(tasks)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint") as pool:
        begun: deque[Future[T]] = deque(_begin(pool, task) for task in islice(rest, THREADS + 2))
        try:
            while begun:
                result = begun.popleft().result()
                begun.extend(_begin(pool, task) for task in islice(rest, 1))
                yield result
        finally:
            for future in begun:
                future.cancel()


def _begin(pool: ThreadPoolExecutor, task: Callable[[], T]) -> Future[T]:
    try:
        return pool.submit(task)
    except RuntimeError as error:  # Python starts no threads once the main thread has ended
        raise CheckpointError("the checkpoint is not read to its end, because this process ends") from error
