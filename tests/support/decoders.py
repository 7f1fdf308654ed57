"""Every decoder of bytes that may come from outside the process, with valid bytes for each: what the fuzzer feeds.

A decoder either returns a value or raises one of its stated errors, within a bounded time and memory.
"""

from __future__ import annotations

import atexit
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from elastrain.base.disk_protocol import ANSWER, LENGTH, Names, Read, Size, decode_request, encode_request
from elastrain.base.line_files import LineBuffer
from elastrain.comm.errors import HandshakeRefused, ProtocolError
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.groups.slot_ring import DOUBLE_BUFFER_BYTES, SlotRing
from elastrain.comm.shm import group_trails
from elastrain.comm.shm.imports import Imports, Reference
from elastrain.comm.shm.segments import SharedMemory
from elastrain.comm.torch_backend import view_change as torch_view
from elastrain.comm.wire.addresses import Frame, MeshConfig, Peer
from elastrain.comm.wire.frames import DTYPES, FIRST_CONTROL_KIND, HEADER_BYTES, Caps, Inline, Parser, RawFrame, encode
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.link import Link
from elastrain.comm.wire.mesh import Mesh
from elastrain.errors import ConfigError
from elastrain.job.checkpoint_plan import CheckpointVote
from elastrain.job.placement import Holders
from elastrain.job.values import Contribution, OpenWork, Record, Report, Vote
from elastrain.job.world import Member, View
from elastrain.launcher.faults.grammar import read_faults
from elastrain.launcher.shared import notices, operator_messages
from elastrain.launcher.shared.job_values import Life, NodeRecord, Roster
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.store import job_keys
from elastrain.launcher.store.port import ForgedValueError, MemoryStore
from elastrain.launcher.store.sealed import SealedStore
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.planning import profile
from elastrain.offload.planning.profile import OffloadStats, StorageBytes
from elastrain.pipeline.graph import CrossingTensor
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction
from elastrain.protocol import agent_messages as am
from elastrain.protocol import messages
from elastrain.protocol.codec import BadMessageError, BitMask, decoder_of
from elastrain.runtime.durable import node_disks
from elastrain.runtime.loop_state import loop_state_codec as carried
from elastrain.snapshot.durable import manifest
from elastrain.snapshot.durable import state_file as durable_frames
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import Part
from elastrain.snapshot.durable.places import node
from elastrain.snapshot.durable.writing import Written
from elastrain.snapshot.shard_state import ShardState
from tests.support import checkpoints

CAPS = Caps(max_body_bytes=1 << 20, max_tensor_bytes=1 << 20)
SECRET = b"s" * 32
_PART = ("offset_bytes", "size_bytes", "tail_bytes", "tail_checksum", "plain_bytes")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """`repair` makes checksums right again after a mutation, so that what lies behind them is reached."""

    name: str
    samples: Sequence[bytes]
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    repair: Callable[[bytes], bytes] = bytes


# ------------------------------------------------------------------------------------------------------------ mutations

_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_WORDS = (b"null", b"-1", b"1e999", b"NaN", b'"', b"[", b"]", b"{", b"}", b"\\u0000", b"\xff", b"\n", b"9" * 30)


def mutations(samples: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Without end: valid bytes, damaged in one to four ways, and noise now and then."""
    chance = random.Random(seed)
    while True:
        if chance.random() < 0.1:
            yield chance.randbytes(chance.randrange(200))
            continue
        data = bytearray(chance.choice(samples))
        for _ in range(chance.randint(1, 4)):
            _damage(data, samples, chance)
        yield bytes(data)


def _damage(data: bytearray, samples: Sequence[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(data) + 1)
    to = min(len(data), at + chance.randrange(1, 17))
    match chance.randrange(8):
        case 0:
            del data[at:]
        case 1:
            del data[at:to]
        case 2:
            data[at:at] = data[at:to] * chance.randrange(1, 5)
        case 3:
            other = chance.choice(samples)
            data[at:] = other[chance.randrange(len(other) + 1) :]
        case 4:
            data[at:to] = chance.randbytes(to - at)
        case 5:
            edge = chance.choice(_EDGES).to_bytes(8, "little")[: chance.choice((1, 2, 4, 8))]
            data[at : at + len(edge)] = edge
        case 6:
            data[at:to] = chance.choice(_WORDS)
        case 7:
            data[at:at] = chance.choice((b"[", b'{"a":', b"\x91", b"\x81\xa1a")) * chance.choice((1, 50, 2000))


# ------------------------------------------------------------------------------------------------------- on the network


def _hello() -> bytes:
    return Handshake(Role.DIAL, secret=SECRET, job="job", me="a").bytes_to_send()


def _greet(role: Role, data: bytes) -> None:
    """As a connection would: no more at once than is asked for. No bytes without the secret may come to an end."""
    hand = Handshake(role, secret=SECRET, job="job", me="b")
    while data and not hand.done:
        wanted = hand.wants()
        assert 0 < wanted <= 520
        hand.receive(data[:wanted])
        data = data[wanted:]
    assert not hand.done


def _answer() -> bytes:
    hand = Handshake(Role.ACCEPT, secret=b"another", job="job", me="b")
    hand.receive(_hello()[:3])
    hand.receive(_hello()[3:])
    return hand.bytes_to_send() + b"\x04\x00\x00"


def _frames(data: bytes) -> list[RawFrame]:
    parser, found = Parser(CAPS), list[RawFrame]()
    while data:
        target = parser.buffer()
        size = min(len(target), len(data))
        target[:size] = data[:size]
        parser.received(size, found)
        data = data[size:]
    for frame in found:
        assert len(frame.body) <= CAPS.max_body_bytes
        assert sum(t.nbytes for t in frame.tensors if isinstance(t, torch.Tensor)) <= CAPS.max_tensor_bytes
    return found


def _with_right_checksums(data: bytes) -> bytes:
    if len(data) < HEADER_BYTES:
        return data
    lengths = struct.unpack_from("<II", data, 16)
    payload = data[HEADER_BYTES : HEADER_BYTES + sum(lengths)]
    head = b"ELFR\x01" + data[5:HEADER_BYTES]
    head = head[: HEADER_BYTES - 8] + struct.pack("<I", zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + data[HEADER_BYTES:]


def _sample_frames() -> list[bytes]:
    inline = [Inline(dtype=torch.float32, shape=(2, 3)), Inline(dtype=torch.int64, shape=())]
    reference = Reference(dtype=torch.int32, shape=(4,), segment=1, offset_bytes=64, token=7)
    return [
        encode(kind=1, generation=1, body=b"body", tensors=()),
        encode(kind=2, generation=3, body=b"", tensors=inline) + bytes(32),
        encode(kind=3, generation=2, body=b"x" * 100, tensors=[reference, *inline]) + bytes(32),
        encode(kind=FIRST_CONTROL_KIND + 3, generation=1, body=struct.pack("<Q", 9), tensors=()),
    ]


class _Deaf:
    def take_fd(self) -> int:
        raise ProtocolError("no descriptor came")


class _OneLink:
    """A link whose peer says what the fuzzer makes up."""

    def __init__(self) -> None:
        self._memory = SharedMemory(1 << 20)
        self._tensor = self._memory.empty(64, torch.float32)
        place = self._memory.find(self._tensor)
        assert place is not None
        self._imports = Imports()
        self._imports.add(1, place.region.segment.fd, place.region.segment.mapping.size_bytes)

    def control(self, data: bytes) -> None:
        link = Link(Peer(id="p", node="n", address="unix:x"), same_host=True, memory=self._memory)
        link.stream = _Deaf()  # type: ignore[assignment]
        raw = RawFrame(kind=FIRST_CONTROL_KIND + (data[0] % 9 if data else 0), generation=1, body=data[1:], tensors=())
        link.take(raw, lambda at_s: None)

    def reference(self, data: bytes) -> None:
        code, segment, offset, dims = struct.unpack_from("<BBQB", data.ljust(11, b"\x00"))
        shape = struct.unpack(f"<{dims % 4}Q", data[11 : 11 + 8 * (dims % 4)].ljust(8 * (dims % 4), b"\x00"))
        where = {"segment": segment, "offset_bytes": offset, "token": 1}
        found = self._imports.tensor(Reference(dtype=DTYPES[code % len(DTYPES)], shape=shape, **where))
        assert found.nbytes <= 1 << 20


def _ring() -> SlotRing:
    return SlotRing(torch.zeros(DOUBLE_BUFFER_BYTES // 2, dtype=torch.uint8))


def _read_ring(ring: SlotRing, data: bytes) -> None:
    """`data` lies where a peer's entries lie, in memory that only that peer writes."""
    data = data[:1000]
    ring._bytes[128 : 128 + len(data)] = data  # where the slot of step 0 begins
    ring.read(0, 1)


# ------------------------------------------------------------------------------------------------------------- messages

_CONTRIBUTION = Contribution(loss=1.5, weight=4.0, samples=4, fingerprint=99, sums=(("correct", 3.0),))
_RECORD = Record(
    step=3,
    generation=2,
    contribution=_CONTRIBUTION,
    square_norm=0.5,
    skipped=False,
    switch=False,
    roles=((0, Holders("m0", ("m1",))),),
)


def _messages() -> list[bytes]:
    said: list[Any] = [
        messages.Partial(
            step=3, block=0, node=(0, 1), contribution=_CONTRIBUTION, touched=BitMask(7), lanes=((0, 0), (1, 0))
        ),
        messages.Gradient(
            step=3,
            shards=(0,),
            contribution=_CONTRIBUTION,
            touched=((BitMask(1 << 90),),),
            square_norms=(float("nan"),),
        ),
        messages.Boundary(
            name=BoundaryName(3, 1, 2, Direction.GRADIENT),
            tensors=(CrossingTensor(shape=(2,), stride=(1,), dtype="float32", itemsize=4, requires_grad=True), None),
            contribution=_CONTRIBUTION,
        ),
        messages.Publish(step=3, record=_RECORD, shards=(0, 1)),
        messages.Ack(step=3, shards=(0, 1)),
        messages.Digests(step=3, digests=((0, 5),), parameters=((0, 6),)),
        messages.ShardCopy(step=3, shard=0, digest=7, part=(1, 3)),
        messages.Copied(step=3, shard=0, intact=True),
        messages.LoopHandover(step=3, state='{"parts": {}}'),
        messages.PartReport(step=3, shards=(0,), told=("{}",), lacking=(1,), problem="no space"),
        messages.WriteInstead(step=3, shards=(0, 1)),
        messages.CheckpointOver(step=3, reason="given up", told=""),
        Vote(
            step=3,
            seen=2,
            contribution=_CONTRIBUTION,
            square_norms=((0, 0.5),),
            roles=_RECORD.roles,
            settings="{}",
            checks=(),
            before=(),
            checkpoint=CheckpointVote(),
            graph="",
            plan=None,
        ),
        Report(
            wrong=None,
            committed=3,
            record=_RECORD,
            base=(Holders("m0", ()),),
            parameters=(0,),
            held=((0, 3, (2,)),),
            begun=4,
            finishing=False,
            work=OpenWork(),
            own=(((0, 1),),),
            folded=((0, 0, ((0, 1),)),),
        ),
    ]
    return [bytes([number]) + body for number, body in map(messages.encode, said)]


_MEMBERS = (Member(id="m0", node="a", address="tcp:10.0.0.1:1", incarnation=2), Member(id="m1", node="b"))
_VIEW = View(generation=2, members=_MEMBERS, reason="m2 was lost", begun=True)
_NODE = NodeRecord(name="a", incarnation=1, workers=2, endpoint="10.0.0.1:4", master_port=5, ready=_MEMBERS)


def _codec(name: str, codec: Any, said: Sequence[Any]) -> Decoder:
    return Decoder(
        name=name, samples=[codec.encode(each) for each in said], decode=codec.decode, errors=(BadMessageError,)
    )


def _line_codecs() -> list[Decoder]:
    from_worker = [
        am.Hello(member="m0", address="unix:x", spec={"seed": 0, "none": None}),
        am.FirstCommitDue(),
        am.Progress(step=3, loss=0.1, samples=8, holders={"0": ("m0", "m1")}),
        am.Failed(step=3, micro_batch=None, signature="E", traceback="TB"),
        am.Note(fields={"noticed": [1, {"x": 2.5}]}),
    ]
    to_worker = [
        am.NewView(view=_VIEW),
        am.ArmFault(kind="kill", step=4, phase=None, options={"for": 1.5}),
        am.Stop(reason="x"),
    ]
    told = [
        notices.Beat(wall_s=1.5e9),
        notices.Raised(member="m0", step=1, micro_batch=-1, signature="E", traceback="TB"),
        notices.Over(code=1, sentence="over"),
        notices.WorkShared(members={"m0": notices.MemberWork(micro_batches=2.5, memory_bytes=7)}),
    ]
    asked = [operator_messages.AskState(), operator_messages.AskFault(line="kill --target member:m0 --at step=1")]
    return [
        _codec("a worker's line", am.FROM_WORKER, from_worker),
        _codec("an agent's line to its worker", am.TO_WORKER, to_worker),
        _codec("another agent's line", notices.NOTICE, told),
        _codec("an operator's line", operator_messages.REQUEST, asked),
        _codec(
            "the answer to an operator", operator_messages.ANSWER, [operator_messages.Answer(ok=True, state={"a": [1]})]
        ),
    ]


# ------------------------------------------------------------------------------------------------------ store and files


def _store_values() -> list[Decoder]:
    sealed = SealedStore(MemoryStore(), SECRET)
    good = sealed._seal("/elastrain/j/view", b"{}") + b"{}"

    def open_value(data: bytes) -> None:
        assert sealed.open_value("/elastrain/j/view", data) == b"{}"

    return [
        Decoder(name="a sealed value", samples=[good], decode=open_value, errors=(ForgedValueError,)),
        Decoder(
            name="a view in the store",
            samples=[job_keys.encode_view(_VIEW)],
            decode=job_keys.decode_view,
            errors=(ValueError,),
        ),
        Decoder(
            name="a node's record",
            samples=[job_keys.encode_record(_NODE)],
            decode=job_keys.decode_record,
            errors=(ValueError,),
        ),
        Decoder(
            name="a question about another node's disk",
            samples=[
                encode_request(asked)[LENGTH.size :]
                for asked in (
                    Names(checkpoint="c"),
                    Size(checkpoint="c", file="f"),
                    Read(checkpoint="c", file="f", offset_bytes=0, size_bytes=9),
                )
            ],
            decode=decode_request,
            errors=(ValueError,),
        ),
        Decoder(
            name="the life of a job",
            samples=[json.dumps({"number": 2, "step": 7, "start": "x", "resume": None}).encode()],
            decode=decoder_of(Life),
            errors=(ValueError,),
        ),
        Decoder(
            name="the roster",
            samples=[job_keys.encode_roster(Roster(nodes=(_NODE, _NODE)))],
            decode=job_keys.decode_roster,
            errors=(ValueError,),
        ),
    ]


def _profile() -> bytes:
    storages = StorageBytes(**{field.name: 0 for field in fields(StorageBytes)})
    stats = OffloadStats(
        limit_bytes=0, passes=0, elapsed_s=0.0, storages=storages, save_stall_s=0.0, need_stall_s=0.0, amount="none"
    )
    return profile.encode(profile.Profile(stats=stats, places=(), reason="why", host="h"))


def _files(folder: Path) -> list[Decoder]:
    def read(name: str, how: Callable[[Path], object]) -> Callable[[bytes], object]:
        def decode(data: bytes) -> object:
            (folder / name).write_bytes(data)
            return how(folder / name)

        return decode

    run = RunDir(path=folder)
    faults = b"kill --target member:m1 --at step=3,phase=backward # why\nkill --target=node:a --at=step=4\n"
    state = json.dumps({"state": "running", "members": [{"id": "m0"}], "step": 3}).encode()
    return [
        Decoder(name="a faults file", samples=[faults], decode=read("faults", read_faults), errors=(ConfigError,)),
        Decoder(
            name="what groups did last",
            samples=[struct.pack("<qB64s160s23x", 3, 2, b"world", b"barrier") * 2],
            decode=read("m0.groups", group_trails.read),
            errors=(),
        ),
        Decoder(
            name="run.json",
            samples=[state],
            decode=read("run.json", lambda _path: run.read_state()),
            errors=(ConfigError,),
        ),
        Decoder(
            name="an offload profile",
            samples=[_profile()],
            decode=read("profile", profile.read),
            errors=(OffloadConfigError,),
        ),
    ]


# --------------------------------------------------------------------------------------------------- what tensors carry


class BytesFile:
    """A file in memory, as `places.port.Source` and, while it is made, as `Sink`."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def write(self, data: memoryview) -> None:
        self.data += bytes(data)

    def sync(self) -> None: ...

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        view[:] = self.data[offset_bytes : offset_bytes + view.nbytes]

    def close(self) -> None: ...


def _checkpoints() -> list[Decoder]:
    """Checksums are made right again: what lies behind them is reached."""
    written = Written(shard=0, version=1, digest=2, part=Part(file="f", **dict.fromkeys(_PART, 1)))
    text = manifest.encode(checkpoints.manifest(1, [[written]]))
    section = BytesFile()
    arrays = [("float32", memoryview(bytes(70_000))), ("uint8", memoryview(b"x" * 9))]
    part = durable_frames.write(section, "f", b"{}", arrays)

    def repair(data: bytes) -> bytes:
        body = data.partition(b"\n")[2]
        head = {"format": 1, "bytes": len(body), "xxh3": f"{xxhash.xxh3_64_intdigest(body):016x}"}
        return json.dumps(head).encode() + b"\n" + body

    def read_section(data: bytes) -> object:
        tail = data[-part.tail_bytes :]
        damaged = replace(
            part, size_bytes=len(data), tail_bytes=len(tail), tail_checksum=xxhash.xxh3_64_intdigest(tail)
        )
        durable_frames.check(BytesFile(data), damaged, "it")
        return None

    errors = (CheckpointError,)
    return [
        Decoder(name="a manifest", samples=[text], decode=lambda d: manifest.decode(d, "it"), errors=errors),
        Decoder(
            name="a repaired manifest",
            samples=[text],
            decode=lambda d: manifest.decode(d, "it"),
            errors=errors,
            repair=repair,
        ),
        Decoder(name="a section of a part", samples=[section.data], decode=read_section, errors=errors),
    ]


def _states() -> list[Decoder]:
    piece: dict[str, Any] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "lr": 0.1, "none": None, "yes": True}
    meta, tensors = ShardState(shard=0, version=3, parameters=torch.ones(4), pieces=[piece]).pack()
    packer = carried.Packer()
    thing = {"a": [1, 2.5, None], ("t", 1): torch.ones(3), "n": {1, 2}, "b": b"xy", "c": 1j}
    tree = packer.pack("x", {**thing, "array": np.arange(4)})
    (whole,) = packer.payload()

    def unpack(data: bytes) -> object:
        try:
            told = json.loads(data)
        except (ValueError, RecursionError):
            return None  # what the text is read from says so itself
        return carried.unpack(told, whole)

    def shard_state(data: bytes) -> object:
        return ShardState.unpack(data, tensors)

    handle = json.dumps(
        {"peer": {"id": "a", "node": "n", "address": "x"}, "counts": {"generation": 1, "steps": 2, "groups": 3}}
    )
    return [
        Decoder(name="a shard's state", samples=[meta], decode=shard_state, errors=(ValueError,)),
        Decoder(name="carried state", samples=[json.dumps(tree).encode()], decode=unpack, errors=(ConfigError,)),
        Decoder(
            name="a handle",
            samples=[handle.encode()],
            decode=lambda data: torch_view._decode(data.decode(errors="replace")),
            errors=(ValueError,),
        ),
    ]


class _Said:
    """A stream on which a node's agent says what the fuzzer makes up."""

    def __init__(self, data: bytes) -> None:
        self._rest = data

    def send(self, data: bytes) -> None: ...

    def receive(self, size_bytes: int) -> bytes:
        assert size_bytes <= node_disks._ANSWER_BYTES_MAX  # memory is taken for so much
        data, self._rest = self._rest[:size_bytes], self._rest[size_bytes:]
        if len(data) < size_bytes:
            raise EOFError
        return data


def _disks() -> list[Decoder]:
    """Of other nodes, as a member that resumes reads them."""

    def names(data: bytes) -> object:
        body = node_disks._asked(_Said(data), Names(checkpoint="c"), None)  # type: ignore[arg-type]
        return node._decoded(body, list[str], "it")

    return [
        Decoder(
            name="what another node's disk answers",
            samples=[ANSWER.pack(1, 9) + b'["a","b"]'],
            decode=names,
            errors=(EOFError, CheckpointError),
        ),
    ]


class _Spoken:
    """A communicator of one, to which frames come as if they had passed the mesh."""

    def __init__(self) -> None:
        me = Mesh(me="a", node="n", job="j", secret=SECRET, config=MeshConfig(transport="unix"))
        self._communicator = Communicator(me)
        self._peer, self._heard = Peer(id="a", node="n", address=me.address), 0
        self._fence = torch.zeros(1, dtype=torch.int64)
        self._rings = torch.zeros(DOUBLE_BUFFER_BYTES, dtype=torch.uint8)
        atexit.register(self._communicator.close)

    def hear(self, data: bytes) -> None:
        if self._heard % 20 == 0:  # what was told of an end counts until the next view
            self._communicator.edit(1 + self._heard // 20, [self._peer])
        self._heard += 1
        kind, carried = (*data, 0, 0)[:2]
        tensors = ((), (self._fence,), (self._rings,))[carried % 3]
        frame = Frame(source="b", generation=1, kind=0x0101 + kind % 6, body=data[2:], tensors=tensors)
        self._communicator._driver.call(lambda: self._communicator._understand(frame))


def decoders(folder: Path) -> list[Decoder]:
    """`folder`: for those that read files."""
    link, ring, spoken = _OneLink(), _ring(), _Spoken()
    numbered = Decoder(
        name="a member's message",
        samples=_messages(),
        decode=lambda data: messages.decode(data[0] if data else 0, data[1:]),
        errors=(BadMessageError,),
    )
    return [
        Decoder(
            name="a greeting",
            samples=[_hello() * 2],
            decode=lambda data: _greet(Role.ACCEPT, data),
            errors=(HandshakeRefused,),
        ),
        Decoder(
            name="the answer to a greeting",
            samples=[_answer()],
            decode=lambda data: _greet(Role.DIAL, data),
            errors=(HandshakeRefused,),
        ),
        Decoder(name="frames", samples=_sample_frames(), decode=_frames, errors=(ProtocolError,)),
        Decoder(
            name="frames with right checksums",
            samples=_sample_frames(),
            decode=_frames,
            errors=(ProtocolError,),
            repair=_with_right_checksums,
        ),
        Decoder(
            name="a control frame",
            samples=[bytes([kind]) + struct.pack("<QQ", 1, 2)[: 12 if kind == 1 else 8] for kind in range(9)],
            decode=link.control,
            errors=(ProtocolError,),
        ),
        Decoder(
            name="a reference into shared memory",
            samples=[struct.pack("<BBQBQ", 0, 1, 64, 1, 4), struct.pack("<BBQBQQ", 4, 1, 8, 2, 2, 4)],
            decode=link.reference,
            errors=(ProtocolError,),
        ),
        Decoder(
            name="an entry in shared memory",
            samples=[struct.pack("<QQQ", 0, 64, 1) + bytes(60)],
            decode=lambda data: _read_ring(ring, data),
            errors=(ProtocolError,),
        ),
        Decoder(
            name="a frame of a communicator",
            samples=[
                bytes(kind_and_tensor) + struct.pack("<QQBq", 1, 2, 0, 3) + b"barrier"
                for kind_and_tensor in ((0, 0), (1, 0), (2, 1), (3, 1), (4, 2))
            ],
            decode=spoken.hear,
            errors=(ProtocolError,),
        ),
        Decoder(
            name="lines",
            samples=[b"one\ntwo\nthree"],
            decode=lambda data: LineBuffer(100).feed(data),
            errors=(ValueError,),
        ),
        numbered,
        *_line_codecs(),
        *_store_values(),
        *_files(folder),
        *_states(),
        *_checkpoints(),
        *_disks(),
    ]
