"""What a checkpoint is: a manifest of plain values, read strictly. No torch, no files.

Its text has two lines: a head with format version, length and checksum, and the values as JSON. A part of a file holds
one shard's state, or one named attachment (such as the loop's state), as `sections` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import msgspec
import xxhash

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, OtherFormatError

FORMAT = 1
MANIFEST = "manifest.json"
VERIFIED = "verified"
LOOP = "loop"
"""The attachment with the training loop's state, as a newcomer gets it."""
BUFFERS = "buffers"
"""The attachment with the model's buffers that are no running statistics."""
MODEL = "model"
OPTIMIZER = "optimizer"
"""The attachments of an imported checkpoint (step -1), which has no shards."""
_HEAD_BYTES_MAX = 256
_NAME = re.compile(r"life-(\d{4,})-step-(-1|\d{10,})\Z")


class PlainValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the values: has no fields; an unknown field is an error."""


class Part(PlainValue, frozen=True):
    """Where a section lies: `size_bytes` from `offset_bytes` on, the last `tail_bytes` of which describe it."""

    file: str
    """Its name in the checkpoint's folder."""
    offset_bytes: int
    size_bytes: int
    tail_bytes: int
    tail_checksum: int
    """xxh3 (64 bits) of the tail, which has the checksums of all frames."""
    plain_bytes: int
    """Bytes of its tensors in memory."""


class ParameterEntry(PlainValue, frozen=True):
    """A parameter or running statistic of the model; `group`: as in `job.layout` (-1 frozen, -2 statistics)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The model's, without `torch.`; a shard of half precision is kept in float32."""
    group: int
    also: tuple[str, ...] = ()
    """Further names of it in the model's `state_dict`, where it is tied."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


class PieceEntry(PlainValue, frozen=True):
    """Elements `start..start + valid_numel` of a shard are those of a parameter from its element `offset` on.

    `numel` counts the padding after them too.
    """

    parameter: int
    """Index in `Manifest.parameters`."""
    start: int
    numel: int
    valid_numel: int
    offset: int


class ShardEntry(PlainValue, frozen=True):
    """One shard: what lies in it, the digest of its state (`ShardState.digest`), and where copies of it lie.

    `pieces` covers everything in it, also of frozen parameters and running statistics, which have no optimizer state.
    """

    index: int
    block: str
    dtype: str
    """Of the state's parameters."""
    numel: int
    pieces: tuple[PieceEntry, ...]
    digest: int
    parts: tuple[Part, ...]
    """Each one a whole copy: one in a shared directory, one per holder on local disks."""


class GroupEntry(PlainValue, frozen=True):
    """A parameter group of the optimizer: names in its own order, hyperparameters after the step."""

    parameters: tuple[str, ...]
    hyper: dict[str, Any]


class Manifest(PlainValue, frozen=True):
    """All that a checkpoint is. Plain values, so that it can be shown, compared and read by any program."""

    job: str
    life: int
    """Rises whenever the job begins anew from a checkpoint after losing everything."""
    step: int
    """The last committed step that is in it; -1 for an initial state."""
    time_s: float
    """Unix time at which the step was committed."""
    spec: dict[str, Any]
    """Name -> JSON value: what has to be equal on resume."""
    counters: dict[str, Any]
    """Name -> JSON value: samples, loss, ...: what the job goes on counting."""
    optimizer: str
    """Name of the optimizer's class; empty where only a model was imported."""
    parameters: tuple[ParameterEntry, ...]
    groups: tuple[GroupEntry, ...]
    shards: tuple[ShardEntry, ...]
    attachments: dict[str, tuple[Part, ...]]
    """Name -> copies of texts with tensors: LOOP, BUFFERS, or MODEL and OPTIMIZER."""
    changes: tuple[str, ...] = ()
    """What was changed on purpose on the way here, a sentence each: see `--accept-changes`."""

    @property
    def is_spread(self) -> bool:
        """Its parts lie on the local disks of several nodes, each of which has a copy of the loop's state."""
        return any(len(parts) > 1 for parts in self.attachments.values())

    @property
    def content(self) -> str:
        """The same for all manifests of one checkpoint: on local disks two may name different copies of its parts."""
        digests = [shard.digest for shard in self.shards]
        told = msgspec.json.encode([self.job, self.life, self.step, digests, sorted(self.attachments)])
        return f"{xxhash.xxh3_64_intdigest(told):016x}"

    @property
    def copies(self) -> tuple[tuple[Part, ...], ...]:
        """Of each shard and attachment."""
        return (*(shard.parts for shard in self.shards), *self.attachments.values())

    @property
    def needs(self) -> tuple[tuple[str, ...], ...]:
        """For each shard and attachment the files that have a copy, of which one is needed; each set of files once."""
        return tuple(sorted({tuple(sorted(part.file for part in parts)) for parts in self.copies}))

    @property
    def name(self) -> str:
        """The folder that it lies in."""
        return name_of(self.life, self.step)

    @property
    def plain_bytes(self) -> int:
        """Bytes in memory of everything in it, each once."""
        return sum(parts[0].plain_bytes for parts in self.copies if parts)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of everything in it, each once."""
        return sum(parts[0].size_bytes for parts in self.copies if parts)

    @property
    def files(self) -> frozenset[str]:
        """Names of the files that parts of it lie in."""
        return frozenset(part.file for parts in self.copies for part in parts)


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """One manifest with all copies that any of these names; they have one `content`."""
    first, *others = manifests
    if all(other == first for other in others):
        return first
    shards = tuple(
        msgspec.structs.replace(shard, parts=_all_copies(each.shards[shard.index].parts for each in manifests))
        for shard in first.shards
    )
    attachments = {name: _all_copies(each.attachments[name] for each in manifests) for name in first.attachments}
    return msgspec.structs.replace(first, shards=shards, attachments=attachments)


def _all_copies(named: Iterable[tuple[Part, ...]]) -> tuple[Part, ...]:
    return tuple(dict.fromkeys(part for parts in named for part in parts))


def name_of(life: int, step: int) -> str:
    """Folder of a checkpoint. Names sort as checkpoints do, the newest last (step -1 apart)."""
    return f"life-{life:04d}-step-{step:010d}" if step >= 0 else f"life-{life:04d}-step-{step}"


def place_in_time(name: str) -> tuple[int, int] | None:
    """`(life, step)` of a checkpoint's folder, by which newer ones are told; None for any other name."""
    found = _NAME.match(name)
    return (int(found[1]), int(found[2])) if found else None


def encode(manifest: Manifest) -> bytes:
    """The manifest's text. Raises CheckpointError for values that JSON does not have."""
    try:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=0)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest cannot be written: {error}") from None
    head = {"format": FORMAT, "bytes": len(body), "xxh3": f"{xxhash.xxh3_64_intdigest(body):016x}"}
    return msgspec.json.encode(head) + b"\n" + body


class _Head(msgspec.Struct, frozen=True):
    """Read before anything else; a later format may have more fields."""

    format: int
    bytes: int
    xxh3: str


_HEAD, _MANIFEST = msgspec.json.Decoder(_Head), msgspec.json.Decoder(Manifest)


def decode(text: bytes, where: str) -> Manifest:
    """The manifest that `text` is. Raises DamagedError or OtherFormatError; `where` names it."""
    line, _, body = text.partition(b"\n")
    if len(line) > _HEAD_BYTES_MAX:
        raise DamagedError(f"{where} is damaged: its first line is none of a manifest")
    try:
        head = _HEAD.decode(line)
    except (ValueError, RecursionError):
        raise DamagedError(f"{where} is damaged: its first line is none of a manifest") from None
    if len(body) != head.bytes or f"{xxhash.xxh3_64_intdigest(body):016x}" != head.xxh3:
        raise DamagedError(f"{where} is damaged: its text has another checksum than its first line says")
    try:
        manifest = _MANIFEST.decode(body)
    except (ValueError, RecursionError) as error:
        if head.format != FORMAT:
            raise OtherFormatError(
                f"{where} has format {head.format}, and this elastrain reads format {FORMAT}: use the version that "
                "wrote it"
            ) from None
        raise DamagedError(f"{where} is no manifest: {error}") from None
    if head.format != FORMAT:  # the text under it is one of this format
        raise DamagedError(f"{where} is damaged: its first line says format {head.format}, and its text is of {FORMAT}")
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """Raises DamagedError for values that refer to what is not there."""
    for part in (part for parts in manifest.copies for part in parts):
        bad_name = not part.file or "/" in part.file or part.file.startswith(".")
        if bad_name or min(part.offset_bytes, part.tail_bytes, part.size_bytes - part.tail_bytes) < 0:
            raise DamagedError(f"{where} is no manifest: it has a part {part.file!r} that cannot be")
    for shard in manifest.shards:
        for piece in shard.pieces:
            if not _fits(manifest, shard, piece):
                raise DamagedError(f"{where} is no manifest: a piece of shard {shard.index} does not fit")
    if [shard.index for shard in manifest.shards] != list(range(len(manifest.shards))):
        raise DamagedError(f"{where} is no manifest: its shards are not numbered from 0 on")


def _fits(manifest: Manifest, shard: ShardEntry, piece: PieceEntry) -> bool:
    if not 0 <= piece.parameter < len(manifest.parameters):
        return False
    in_shard = piece.start >= 0 and 0 <= piece.valid_numel <= piece.numel <= shard.numel - piece.start
    return in_shard and 0 <= piece.offset <= manifest.parameters[piece.parameter].numel - piece.valid_numel
