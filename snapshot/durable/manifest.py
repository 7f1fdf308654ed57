"""The manifest of a checkpoint: plain values that describe all of it, decoded strictly. No torch, no files.

The text begins with one line: format version, length and checksum. The values follow as JSON. Each `Part` of a file
holds one shard's state or one named attachment (such as the loop's state), in the format of `state_file`.
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
"""Name of the manifest file in a checkpoint's folder."""
VERIFIED = "verified"
"""Name of the marker file of a checkpoint that was read back completely."""
LOOP = "loop"
"""Name of the attachment with the training loop's state. New members of a job get the same state."""
BUFFERS = "buffers"
"""Name of the attachment with the model's buffers, without running statistics."""
MODEL = "model"
OPTIMIZER = "optimizer"
"""MODEL and OPTIMIZER: names of the attachments of an imported checkpoint (step -1), which has no shards."""
_HEAD_BYTES_MAX = 256
_NAME = re.compile(r"life-(\d{4,})-step-(-1|\d{10,})\Z")


class PlainValue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all values. Decoding refuses unknown fields."""


class Part(PlainValue, frozen=True):
    """A section of a file. It has `size_bytes` from `offset_bytes` on.

    The last `tail_bytes` of it describe the rest.
    """

    file: str
    """Name of the file in the checkpoint's folder."""
    offset_bytes: int
    size_bytes: int
    tail_bytes: int
    tail_checksum: int
    """xxh3 (64 bits) of the tail, which has the checksums of all frames."""
    plain_bytes: int
    """Bytes of the tensors in memory."""


class ParameterEntry(PlainValue, frozen=True):
    """A parameter or running statistic of the model.

    `group` is its parameter group; -1 means frozen, and -2 a running statistic (as in `job.layout`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype in the model, without `torch.`. A shard of a half-precision parameter keeps float32."""
    group: int
    also: tuple[str, ...] = ()
    """Further names in the model's `state_dict`, if the parameter is tied."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class PieceEntry(PlainValue, frozen=True):
    """A run of elements of one parameter inside a shard.

    Elements `start..start + valid_numel` of the shard are those of the parameter from its element `offset` on. `numel`
    also counts the padding after them.
    """

    parameter: int
    """Index in `Manifest.parameters`."""
    start: int
    numel: int
    valid_numel: int
    offset: int


class ShardEntry(PlainValue, frozen=True):
    """One shard: its pieces, the digest of its state (`ShardState.digest`), and its copies.

    `pieces` also covers frozen parameters and running statistics, which have no optimizer state.
    """

    index: int
    block: str
    dtype: str
    """Dtype of the parameters in the state."""
    numel: int
    pieces: tuple[PieceEntry, ...]
    digest: int
    parts: tuple[Part, ...]
    """The copies of the state, each complete: one in a shared directory, or one per holder on local disks."""


class GroupEntry(PlainValue, frozen=True):
    """A parameter group of the optimizer: parameter names in its order, and hyperparameters after the step."""

    parameters: tuple[str, ...]
    hyper: dict[str, Any]


class Manifest(PlainValue, frozen=True):
    """The description of a whole checkpoint as plain values, so that any program can read and compare it."""

    job: str
    life: int
    """Number of the job's life. It rises whenever the job resumes from a checkpoint after losing all members."""
    step: int
    """The last committed step in the checkpoint; -1 for an initial state."""
    time_s: float
    """Unix time at which the step was committed."""
    spec: dict[str, Any]
    """Name -> JSON value of everything that must be equal when a job resumes."""
    counters: dict[str, Any]
    """Name -> JSON value that the job continues to count: samples, loss, …."""
    optimizer: str
    """Name of the optimizer's class; empty if only a model was imported."""
    parameters: tuple[ParameterEntry, ...]
    groups: tuple[GroupEntry, ...]
    shards: tuple[ShardEntry, ...]
    attachments: dict[str, tuple[Part, ...]]
    """Name -> copies of a text with tensors. Names are LOOP, BUFFERS, or MODEL and OPTIMIZER."""
    changes: tuple[str, ...] = ()
    """Deliberate changes since the start of the job, one sentence each: see `--accept-changes`."""

    @property
    def is_spread(self) -> bool:
        """True if the parts lie on the local disks of several nodes. Each such node has a copy of the loop's state."""
        return any(len(parts) > 1 for parts in self.attachments.values())

    @property
    def content(self) -> str:
        """A fingerprint of the contents, equal for all manifests of one checkpoint.

        On local disks, two manifests of one checkpoint may name different copies of its parts.
        """
        digests = [shard.digest for shard in self.shards]
        told = msgspec.json.encode([self.job, self.life, self.step, digests, sorted(self.attachments)])
        return f"{xxhash.xxh3_64_intdigest(told):016x}"

    @property
    def copies(self) -> tuple[tuple[Part, ...], ...]:
        """The copies of each shard and of each attachment."""
        return (*(shard.parts for shard in self.shards), *self.attachments.values())

    @property
    def needs(self) -> tuple[tuple[str, ...], ...]:
        """Sets of files, of each of which one file is needed: the files with copies of a shard or attachment.

        Equal sets appear once.
        """
        return tuple(sorted({tuple(sorted(part.file for part in parts)) for parts in self.copies}))

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return name_of(self.life, self.step)

    @property
    def plain_bytes(self) -> int:
        """Bytes in memory of all shards and attachments, with one copy of each."""
        return sum(parts[0].plain_bytes for parts in self.copies if parts)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of all shards and attachments, with one copy of each."""
        return sum(parts[0].size_bytes for parts in self.copies if parts)

    @property
    def files(self) -> frozenset[str]:
        """Names of all files with parts of the checkpoint."""
        return frozenset(part.file for parts in self.copies for part in parts)


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """Return one manifest with all copies that any of the given manifests names. All must have the same `content`."""
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
    """Return the folder name of a checkpoint. Names sort from oldest to newest, except for step -1."""
    return f"life-{life:04d}-step-{step:010d}" if step >= 0 else f"life-{life:04d}-step-{step}"


def place_in_time(name: str) -> tuple[int, int] | None:
    """Return `(life, step)` from a checkpoint's folder name, or None for any other name. Newer ones compare greater."""
    found = _NAME.match(name)
    return (int(found[1]), int(found[2])) if found else None


def encode(manifest: Manifest) -> bytes:
    """Return the text of a manifest. Raises CheckpointError if a value cannot be expressed in JSON."""
    try:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=0)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest cannot be written: {error}") from None
    head = {"format": FORMAT, "bytes": len(body), "xxh3": f"{xxhash.xxh3_64_intdigest(body):016x}"}
    return msgspec.json.encode(head) + b"\n" + body


class _Head(msgspec.Struct, frozen=True):
    """The first line of a manifest. Later formats may add fields."""

    format: int
    bytes: int
    xxh3: str


_HEAD, _MANIFEST = msgspec.json.Decoder(_Head), msgspec.json.Decoder(Manifest)


def decode(text: bytes, where: str) -> Manifest:
    """Return the manifest from its text. `where` names it in the DamagedError or OtherFormatError that is raised."""
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
    if head.format != FORMAT:  # the body is valid in this format, so the format number is wrong
        raise DamagedError(f"{where} is damaged: its first line says format {head.format}, and its text is of {FORMAT}")
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """Raise DamagedError if a value refers to something that does not exist."""
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
