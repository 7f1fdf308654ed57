"""A packed thing is opened as what it was: content bit for bit, dtypes, shapes, strides."""

from __future__ import annotations

import enum
import os
import re
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrain.errors import ConfigError
from elastrain.runtime.loader import packing

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
        words=["word", None, 3.5, {1, 2}],
    )
    came = _sent(sent)
    assert type(came) is OrderedDict and list(came) == list(sent)
    for name in ("sparse", "rows"):
        assert came[name].layout == sent[name].layout and torch.equal(came[name].to_dense(), torch.eye(4))
    assert type(came["parameter"]) is torch.nn.Parameter and came["parameter"].requires_grad
    assert type(came["marked"]) is _Marked and torch.equal(came["marked"], sent["marked"])
    assert came["meta"].device.type == "meta"
    assert came["words"] == sent["words"]
    assert _sent(tagged).tag == "mine"


def test_what_is_no_data_is_refused_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"lambda.* cannot hand this over: return tensors"):
        packing.pack(lambda: None)
    assert len(os.listdir("/proc/self/fd")) == before


class _Colour(enum.Flag):
    RED = 1
    BLUE = 4


class _Bits(enum.IntFlag, boundary=enum.KEEP):
    A = 1


class _Words(defaultdict[str, list[int]]):
    pass


@pytest.mark.parametrize("factory", [list, int, dict, None, torch.Tensor])
def test_a_defaultdict_keeps_its_factory(factory: Any) -> None:
    sent = defaultdict(factory, a=[defaultdict(list)])
    came = _sent(sent)
    assert (type(came), came, came.default_factory) == (defaultdict, sent, factory)
    assert came["a"][0].default_factory is list
    mine = _sent(_Words(list, b=[1]))
    assert (type(mine), mine["b"], mine["c"]) == (_Words, [1], [])


@pytest.mark.parametrize(
    "flag", [_Colour.RED | _Colour.BLUE, _Colour(0), _Colour.BLUE, _Bits(9), _Bits(0), re.I | re.M], ids=repr
)
def test_combined_flags_arrive_as_they_were(flag: enum.Flag) -> None:
    assert _sent([flag])[0] is flag


def _refused() -> dict[str, tuple[Any, str]]:
    return {
        "a factory": ({"d": defaultdict(lambda: 1)}, r"\['d'\]\['default_factory'\]: .*lambda"),
        "an attribute": ([1, _Sample(lambda: 1, [])], r"\[1\]\['x'\]: .*lambda"),  # type: ignore[arg-type]
        "history": (
            {"a": {2: torch.ones(1, requires_grad=True) * 2}},
            r"\['a'\]\[2\]: a tensor with autograd's history",
        ),
        "an array": ([np.array([threading.Lock()])], r"\[0\]: cannot pickle '_thread.lock'"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["a factory", "an attribute", "history", "an array"])
def test_what_is_refused_is_named_by_its_place(name: str) -> None:
    thing, words = _refused()[name]
    with pytest.raises(ConfigError, match="^batch" + words):
        packing.pack(thing)


@dataclass(frozen=True)
class _Sample:
    x: torch.Tensor
    words: list[str]


class _Pair(NamedTuple):
    x: torch.Tensor
    y: int


class _Counted(UserDict):  # type: ignore[type-arg]
    """As tokenizers' batches are."""


class _Kind(enum.Enum):
    TRAIN = "train"


@dataclass(slots=True)
class _Slim:
    a: int


def test_objects_of_the_users_own_classes_arrive_with_their_attributes() -> None:
    x = torch.arange(3)
    sent = [
        _Sample(x, ["w"]),
        _Pair(x, 2),
        _Counted(x=x),
        _Kind.TRAIN,
        _Slim(4),
        Path("a/b"),
        1 << 90,
        2j,
        slice(1, None),
    ]
    sample, pair, counted, *rest = _sent(sent)
    assert type(sample) is _Sample and torch.equal(sample.x, x) and sample.words == ["w"]
    assert type(pair) is _Pair and pair.y == 2 and pair.x is sample.x
    assert type(counted) is _Counted and counted["x"] is sample.x
    assert rest == sent[3:]


class _Rows:
    """A class that says itself how it is pickled."""

    def __init__(self, rows: list[int]) -> None:
        self.rows, self.open = rows, threading.Lock()

    def __reduce__(self) -> Any:
        return _Rows, (self.rows,)


def test_everything_that_can_be_pickled_arrives() -> None:
    sent = [
        deque([1, 2], maxlen=3),
        datetime(2026, 1, 2, tzinfo=UTC),
        Decimal("1.2"),
        SimpleNamespace(a=[1]),
        np.array([None, "x"], dtype=object),
        np.zeros(2, dtype=[("a", "i4")]),
        _Rows([1]),
    ]
    *plain, objects, fields, rows = _sent(sent)
    assert plain == sent[:4]
    assert objects.tolist() == [None, "x"] and fields.dtype.names == ("a",) and rows.rows == [1]
    ring: list[object] = []
    ring.append(ring)
    came = _sent(ring)
    assert came[0] is came


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_tensors_of_other_layouts_arrive() -> None:
    parts = [torch.ones(2, 4), torch.ones(3, 4)]
    nested, jagged, columns, masked = _sent(
        [
            torch.nested.nested_tensor(parts),
            torch.nested.nested_tensor(parts, layout=torch.jagged),
            torch.eye(3).to_sparse_csc(),
            torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        ]
    )
    for each in (nested, jagged):
        assert [torch.equal(a, b) for a, b in zip(each.unbind(), parts, strict=True)] == [True, True]
    assert torch.equal(columns.to_dense(), torch.eye(3))
    assert masked.get_mask().tolist() == [True, False]


@pytest.mark.parametrize("thing", [threading.Lock(), lambda: 1, os, (n for n in "ab")])
def test_what_has_a_state_of_its_own_is_refused(thing: object) -> None:
    with pytest.raises(ConfigError, match="num_workers=0"):
        packing.pack([thing])


@pytest.mark.parametrize("size", [0, 7, 16, 100])
def test_what_is_no_batch_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="what a loader process has handed over cannot be read"):
        packing.unpack(memoryview(bytearray(size)))
