"""Frames survive any cutting of their bytes; any damage is noticed; the arena never hands out a byte twice."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.imports import Reference
from elastrain.comm.wire.frames import DTYPES, Caps, Inline, Parser, RawFrame, encode, tensor_bytes

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    shapes,
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
references = st.builds(
    Reference,
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    segment=st.integers(0, 2**32 - 1),
    offset_bytes=st.integers(0, 2**60),
    token=st.integers(0, 2**60),
)
frames = st.builds(
    RawFrame,
    kind=st.integers(0, 2**16 - 1),
    generation=st.integers(0, 2**64 - 1),
    body=st.binary(max_size=300),
    tensors=st.lists(tensors | references, max_size=4).map(tuple),
)


def _bytes(frame: RawFrame) -> bytes:
    described = [t if isinstance(t, Reference) else Inline(dtype=t.dtype, shape=tuple(t.shape)) for t in frame.tensors]
    inline = [tensor_bytes(t) for t in frame.tensors if isinstance(t, torch.Tensor)]
    head = encode(kind=frame.kind, generation=frame.generation, body=frame.body, tensors=described)
    return head + b"".join(inline)


def _feed(parser: Parser, data: bytes, cuts: list[int]) -> list[RawFrame]:
    found: list[RawFrame] = []
    while data:
        buffer = parser.buffer()
        size = min(len(buffer), len(data), cuts.pop() if cuts else len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        parser.received(size, found)
    return found


def _same(left: RawFrame, right: RawFrame) -> bool:
    heads = (left.kind, left.generation, left.body) == (right.kind, right.generation, right.body)
    return heads and len(left.tensors) == len(right.tensors) and all(map(_same_tensor, left.tensors, right.tensors))


def _same_tensor(left: torch.Tensor | Reference, right: torch.Tensor | Reference) -> bool:
    if isinstance(left, Reference) or isinstance(right, Reference):
        return left is right or left == right
    return left.dtype == right.dtype and left.shape == right.shape and tensor_bytes(left) == tensor_bytes(right)


@settings(max_examples=3 * settings().max_examples // 2, deadline=None)
@given(st.lists(frames, min_size=1, max_size=4), st.lists(st.integers(1, 60), max_size=200))
def test_any_cutting_of_the_bytes_gives_the_same_frames(sent: list[RawFrame], cuts: list[int]) -> None:
    got = _feed(Parser(Caps()), b"".join(map(_bytes, sent)), cuts)
    assert len(got) == len(sent) and all(map(_same, sent, got))


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(frames, st.data())
def test_any_damaged_byte_of_header_or_payload_is_noticed(frame: RawFrame, data: st.DataObject) -> None:
    described = [t if isinstance(t, Reference) else Inline(dtype=t.dtype, shape=tuple(t.shape)) for t in frame.tensors]
    whole = bytearray(encode(kind=frame.kind, generation=frame.generation, body=frame.body, tensors=described))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    try:
        got = _feed(Parser(Caps()), bytes(whole), [])
    except ProtocolError:
        return
    raise AssertionError(f"byte {position} was changed, and {got} came out")


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(st.binary(min_size=1, max_size=5000))
def test_garbage_never_becomes_a_frame_and_never_takes_memory(junk: bytes) -> None:
    try:
        assert _feed(Parser(Caps(max_body_bytes=100, max_tensor_bytes=100)), junk, []) == []
    except ProtocolError:
        pass
