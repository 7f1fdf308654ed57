"""A packed thing is opened as what it was: content bit for bit, dtypes, shapes, strides."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrain.runtime import packing

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32),
]


def _sent(thing: Any) -> Any:
    fd = packing.pack(thing)
    try:
        memory = packing.take(fd)
    finally:
        os.close(fd)
    return packing.unpack(memory)


def _bytes(tensor: torch.Tensor) -> bytes:
    """Of the content in the order of its indices."""
    content = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return content.reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of random bytes, any dtype, and any shape, order of axes, steps and repetition."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = [size * step for size, step in zip(shape, steps, strict=True)]
    content = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(int(np.prod(whole)) * dtype.itemsize)
    base = torch.frombuffer(bytearray(content + bytes(16)), dtype=torch.uint8)[: len(content)]
    if dtype is torch.bool:
        base = base % 2
    tensor = base.view(dtype).reshape(whole)[tuple(slice(None, None, step) for step in steps)]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(0, 3)), *tensor.shape)
    if dtype.is_complex and dtype is not torch.complex32 and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype in (torch.float32, torch.complex64) and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
    return tensor


@given(st.lists(_tensors(), max_size=4))
def test_tensors_arrive_bit_for_bit(tensors: list[torch.Tensor]) -> None:
    for sent, came in zip(tensors, _sent(tensors), strict=True):
        kept = sent if sent.is_contiguous() else sent.clone()
        assert (came.dtype, came.shape, came.requires_grad) == (sent.dtype, sent.shape, sent.requires_grad)
        assert came.stride() == kept.stride()
        assert _bytes(came) == _bytes(sent)
        assert came.is_leaf and not came._is_view()
        assert came.data_ptr() % 64 == 0


@pytest.mark.parametrize("size", [0, 1, 4_000, 17_000, 300_000])
def test_whatever_its_size_it_can_be_written_and_is_ones_own(size: int) -> None:
    sent = torch.arange(size)
    first, second = _sent([sent, sent.clone()])
    first += 1
    assert torch.equal(first, sent + 1) and torch.equal(second, sent)


def test_only_the_content_of_a_view_travels() -> None:
    fd = packing.pack(torch.zeros(1_000_000)[5:7])
    assert os.fstat(fd).st_size < 1_000
    os.close(fd)


def test_arrays_arrive_as_they_were() -> None:
    frozen = np.arange(6.0)
    frozen.setflags(write=False)
    sent = [np.arange(100_000).reshape(10, -1), np.ones((3, 4), order="F"), np.ones((4, 6))[::2], frozen, np.float32(2)]
    for a, b in zip(sent, _sent(sent), strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
        assert a.flags.writeable == b.flags.writeable and a.flags.f_contiguous == b.flags.f_contiguous


def test_the_same_tensor_twice_is_the_same_tensor_twice() -> None:
    x = torch.ones(3)
    first, second = _sent((x, x))
    assert first is second


class _Marked(torch.Tensor):
    pass


def test_other_kinds_arrive_by_value() -> None:
    tagged = torch.ones(2)
    tagged.tag = "mine"  # type: ignore[attr-defined]
    sent: dict[str, Any] = OrderedDict(
        sparse=torch.eye(4).to_sparse(),
        rows=torch.eye(4).to_sparse_csr(),
        parameter=torch.nn.Parameter(torch.ones(2)),
        marked=torch.ones(3).as_subclass(_Marked),
        meta=torch.empty(3, device="meta"),
        quantized=torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        words=["word", None, 3.5, {1, 2}],
    )
    came = _sent(sent)
    assert type(came) is OrderedDict and list(came) == list(sent)
    for name in ("sparse", "rows"):
        assert came[name].layout == sent[name].layout and torch.equal(came[name].to_dense(), torch.eye(4))
    assert type(came["parameter"]) is torch.nn.Parameter and came["parameter"].requires_grad
    assert type(came["marked"]) is _Marked and torch.equal(came["marked"], sent["marked"])
    assert came["meta"].device.type == "meta"
    assert torch.equal(came["quantized"].int_repr(), sent["quantized"].int_repr())
    assert came["words"] == sent["words"]
    assert _sent(tagged).tag == "mine"


def test_what_can_not_be_pickled_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        packing.pack(lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before
