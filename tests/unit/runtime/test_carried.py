"""State that travels comes back with the bits and types that it had; code stays at home."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.runtime.loop_state.device_reads import DeviceReads
from elastrain.runtime.loop_state.loop_state_codec import Packer, unpack


def _there_and_back(value: Any, own: Any = None) -> Any:
    packer = Packer()
    tree = json.loads(json.dumps(packer.pack("x", value)))
    payload = packer.payload()
    return unpack(tree, payload[0] if payload else None, own)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        0.1,
        "Σ",
        b"\x00\xff",
        1 - 2j,
        [],
        (1, [2.5, ("a", None)]),
        {3: "by number", (1, 2): {"deep": [{}]}, None: 1.0},
        {1, 2, 3},
        frozenset({"a"}),
        deque([1, 2], maxlen=2),
    ],
    ids=repr,
)
def test_plain_data_comes_back_with_its_type(value: Any) -> None:
    back = _there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_an_ordered_dict_comes_back_as_a_dict_and_a_nan_as_a_nan() -> None:
    assert _there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert math.isnan(_there_and_back(float("nan")))


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4)])
def test_a_tensor_of_any_dtype_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)
    back = _there_and_back({"odd": b"1", "t": value})["t"]
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)) or not numel


def test_strided_and_conjugated_views_and_parameters_come_back_as_plain_tensors() -> None:
    values: list[Tensor] = [
        torch.arange(12.0).reshape(3, 4).t()[1:],
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ]
    for value, back in zip(values, _there_and_back(values), strict=True):
        assert torch.equal(value, back)
        assert not back.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.int64(7),
        np.bool_(True),
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        np.array(["ab", "c"]),
        np.zeros((0, 2)),
        np.datetime64("2026-01-01"),
    ],
    ids=repr,
)
def test_numpy_arrays_and_scalars_come_back_with_their_dtype(value: Any) -> None:
    back = _there_and_back([1, value])[1]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert np.array_equal(back, value)


def test_what_came_does_not_share_memory_with_the_message() -> None:
    packer = Packer()
    tree = packer.pack("x", [torch.ones(2)])
    (payload,) = packer.payload()
    (back,) = unpack(tree, payload)
    payload.zero_()
    assert back.tolist() == [1.0, 1.0]


def test_code_is_taken_from_the_members_own_state_wherever_it_lies() -> None:
    theirs = {"steps": [{"rule": math.sin, "rate": 0.1}]}
    ours = {"steps": [{"rule": math.cos, "rate": 0.9}]}
    assert _there_and_back(theirs, own=ours) == {"steps": [{"rule": math.cos, "rate": 0.1}]}
    with pytest.raises(ConfigError, match="same script on all"):
        _there_and_back(theirs, own={"steps": []})


def test_missing_bytes_are_refused() -> None:
    tree = Packer().pack("x", torch.ones(3))
    for whole in (None, torch.zeros(8, dtype=torch.uint8)):
        with pytest.raises(ConfigError, match="lacks bytes"):
            unpack(tree, whole)


def test_in_turn_every_tensor_is_looked_at() -> None:
    tensors = [torch.zeros(5) for _ in range(100)]
    for changed in tensors:
        looks = []
        for value in (0.0, 1.0):
            changed.fill_(value)
            packer = Packer()
            packer.pack("x", tensors)
            looks.append([packer.look(step, DeviceReads())() for step in range(4)])
        assert looks[0] != looks[1]
