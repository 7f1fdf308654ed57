"""States of shards: copies, digests, exact packing, and refusal of everything malformed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.snapshot.shard_state import ShardState

torch.set_num_threads(1)


def _state() -> ShardState:
    generator = torch.Generator().manual_seed(0)
    first = {"step": torch.tensor(3.0), "exp_avg": torch.randn(64, generator=generator), "flag": True, "none": None}
    second = {"count": 7, "lr": 0.1, "nan": math.nan, "inf": -math.inf, "mu": torch.tensor(0.1, dtype=torch.float64)}
    return ShardState(shard=2, version=5, parameters=torch.randn(128, generator=generator), pieces=[first, second, {}])


def _sent(state: ShardState) -> ShardState:
    meta, tensors = state.pack()
    return ShardState.unpack(bytes(meta), [tensor.clone() for tensor in tensors])


def test_packing_keeps_everything_exactly() -> None:
    state, sent = _state(), _sent(_state())
    assert (sent.shard, sent.version) == (2, 5)
    assert torch.equal(sent.parameters, state.parameters)
    first, second, third = sent.pieces
    assert isinstance(first["step"], torch.Tensor) and first["step"].shape == () and first["step"].item() == 3.0
    assert first["flag"] is True and first["none"] is None and third == {}
    assert second["count"] == 7 and isinstance(second["count"], int)
    assert second["lr"] == 0.1 and math.isnan(second["nan"]) and second["inf"] == -math.inf  # type: ignore[arg-type]
    assert second["mu"].dtype == torch.float64 and second["mu"].item() == 0.1  # type: ignore[union-attr]
    assert sent.digest() == state.digest() and sent.pack()[0] == state.pack()[0]


def test_packing_copies_no_tensor() -> None:
    state = _state()
    assert state.pack()[1][0].data_ptr() == state.parameters.data_ptr()


def test_a_clone_shares_no_memory() -> None:
    state = _state()
    clone = state.clone()
    before = clone.digest()
    state.parameters.zero_()
    for value in state.pieces[0].values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    state.pieces[1]["count"] = 8
    assert clone.digest() == before == _state().digest()


def test_bytes_are_those_of_all_tensors() -> None:
    assert _state().nbytes == 128 * 4 + 64 * 4 + 4 + 8
    assert ShardState(shard=0, parameters=torch.zeros(2)).version == -1


def _renamed(state: ShardState) -> None:
    state.pieces[0]["exp_avg_sq"] = state.pieces[0].pop("exp_avg")


def _moved(state: ShardState) -> None:
    state.pieces.reverse()


CHANGES: dict[str, Callable[[ShardState], object]] = {
    "shard": lambda s: setattr(s, "shard", 3),
    "version": lambda s: setattr(s, "version", 6),
    "parameters": lambda s: s.parameters[3].add_(1e-6),
    "tensor": lambda s: s.pieces[0]["exp_avg"][63].neg_(),  # type: ignore[index, union-attr]
    "scalar tensor": lambda s: s.pieces[0].update(step=torch.tensor(4.0)),
    "dtype of a scalar": lambda s: s.pieces[0].update(step=torch.tensor(3.0, dtype=torch.float64)),
    "integer": lambda s: s.pieces[1].update(count=8),
    "float": lambda s: s.pieces[1].update(lr=math.nextafter(0.1, 1)),
    "kind of number": lambda s: s.pieces[1].update(count=7.0),
    "flag": lambda s: s.pieces[0].update(flag=False),
    "name": _renamed,
    "order of pieces": _moved,
    "number of pieces": lambda s: s.pieces.append({}),
    "missing entry": lambda s: s.pieces[0].pop("none"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_digest_and_checksum_cover(what: str) -> None:
    state = _state()
    CHANGES[what](state)
    assert state.digest() != _state().digest()
    assert state.checksum() != _state().checksum()


def test_the_digest_does_not_depend_on_the_order_in_which_entries_were_made() -> None:
    state = _state()
    state.pieces[1] = dict(reversed(state.pieces[1].items()))
    assert state.digest() == _state().digest()
    assert state.checksum() == _state().checksum()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (torch.zeros(2, 2), r"shape \(2, 2\)"),
        (torch.zeros(4)[::2], "contiguous 1-D"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        ("word", "str"),
    ],
)
def test_what_can_not_be_packed_is_named(value: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ShardState(shard=0, parameters=torch.zeros(4), pieces=[{"x": value}]).pack()


def _with(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda meta: meta.update(fields)


def _entry(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda meta: meta["pieces"][0].update(x=value)


MALFORMED: dict[str, Callable[[dict[str, Any]], object]] = {
    "format": _with(format=2),
    "extra field": _with(more=1),
    "missing field": lambda meta: meta.pop("version"),
    "version": _with(version=-2),
    "fraction": _with(version=1.5),
    "flag as number": _with(version=True),
    "shard": _with(shard=-1),
    "pieces": _with(pieces={}),
    "piece": _with(pieces=[3]),
    "parameters": _with(parameters=3),
    "dtype": lambda meta: meta["parameters"].update(dtype="float31"),
    "dtype as list": lambda meta: meta["parameters"].update(dtype=["float32"]),
    "other dtype": lambda meta: meta["parameters"].update(dtype="int32"),
    "numel": lambda meta: meta["parameters"].update(numel=127),
    "index": lambda meta: meta["parameters"].update(tensor=1),
    "tensor twice": _entry({"tensor": 0, "dtype": "float32", "numel": 128}),
    "tensor that did not come": _entry({"tensor": 2, "dtype": "float32", "numel": 128}),
    "unknown entry": _entry({"pickle": "…"}),
    "bare entry": _entry(3),
    "extra key": _entry({"int": "3", "more": 1}),
    "integer": _entry({"int": "3x"}),
    "endless integer": _entry({"int": "9" * 5000}),
    "float": _entry({"float": "zebra"}),
    "float beyond range": _entry({"float": "0x1p99999"}),
    "scalar too short": _entry({"scalar": "00", "dtype": "float32"}),
    "scalar not hexadecimal": _entry({"scalar": "zz", "dtype": "float32"}),
    "scalar of no kind": _entry({"scalar": "00000000", "dtype": "object"}),
    "boolean of neither kind": _entry({"scalar": "02", "dtype": "bool"}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_descriptions_are_refused(what: str) -> None:
    raw, tensors = _state().pack()
    meta = json.loads(raw)
    MALFORMED[what](meta)
    with pytest.raises(ValueError, match="shard state"):
        ShardState.unpack(json.dumps(meta).encode(), tensors)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b"3", b"{", b"[" * 100_000, b" " * (64 * 1024 * 1024 + 1)])
def test_what_is_no_description_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="shard state"):
        ShardState.unpack(raw, [])


def test_tensors_too_few_too_many_or_of_another_shape_are_refused() -> None:
    meta, tensors = _state().pack()
    for wrong in ([], tensors[:1], [*tensors, tensors[0]], tensors[::-1], [tensors[0].view(2, 64), tensors[1]]):
        with pytest.raises(ValueError, match="shard state"):
            ShardState.unpack(meta, wrong)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_description_is_refused_or_read_as_a_state(place: int, byte: int, cut: bool) -> None:
    meta, tensors = _state().pack()
    damaged = bytearray(meta)
    damaged[place % len(meta)] = byte
    if cut:
        del damaged[place % len(meta) :]
    try:
        state = ShardState.unpack(bytes(damaged), tensors)
    except ValueError:
        return
    assert state.pack()[1][0] is tensors[0]
