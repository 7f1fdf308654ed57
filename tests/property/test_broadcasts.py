"""Broadcasts: what travels comes out as it went in, and the member of the rank gives it, whoever takes part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrain.comm.wire.frames import Caps
from elastrain.decisions.batch_shares import AHEAD, Shares
from elastrain.errors import ConfigError
from elastrain.runtime.broadcast import VALUE_BYTES_MAX, OneValue, SentValues, from_text, to_text

CPU = torch.device("cpu")
keys = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4)
plain = st.recursive(
    keys | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys | st.tuples(keys), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(thing=plain)
def test_plain_data_comes_out_as_it_went_in(thing: Any) -> None:
    assert repr(from_text(to_text(thing), CPU)) == repr(thing)  # repr: -0.0, and True is not 1


@given(raw=st.binary(max_size=40), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
def test_tensors_and_arrays_keep_every_bit(raw: bytes, dtype: torch.dtype) -> None:
    held = bytearray(raw[: len(raw) // 8 * 8])
    tensor = torch.frombuffer(held, dtype=dtype).clone() if held else torch.empty(0, 3, dtype=dtype)
    array = np.frombuffer(raw, dtype=np.uint8)
    found = from_text(to_text({"a": [tensor, 1], "b": (array, np.float64(2.5))}), CPU)
    assert found["a"][0].dtype == tensor.dtype
    assert found["a"][0].shape == tensor.shape
    assert found["a"][0].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    assert (found["b"][0] == array).all()
    assert type(found["b"][1]) is np.float64
    found["a"][0].add_(1)  # the copy may be written to, like any tensor


def test_a_nan_and_a_word_that_no_encoding_has_travel() -> None:
    assert repr(from_text(to_text([float("nan"), float("-inf"), "\ud800", 10**40]), CPU)) == repr(
        [float("nan"), float("-inf"), "\ud800", 10**40]
    )


class Thing:
    """No data."""


def itself() -> list[Any]:
    """Return a list that contains itself."""
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        ({"a": [1, Thing()]}, r"the value of job.broadcast\(…\)\['a'\]\[1\] is a .*Thing, which cannot be carried"),
        ([print], r"\(…\)\[0\] is a builtins.builtin_function_or_method, which"),
        (Thing, r"\(…\) is a builtins.type, which"),
        (torch.ones(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (np.array([Thing()]), "a NumPy array of object"),
        (itself(), "cannot be written as text"),
        pytest.param(10**5000, "cannot be written as text", id="many digits"),
        pytest.param(b"x" * VALUE_BYTES_MAX, "at most 8388608 travel: write it to a file", id="many bytes"),
    ],
)
def test_what_is_no_data_is_one_sentence_with_type_and_place(thing: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        to_text(thing)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 3, True, 1.0, "0", None])
def test_a_rank_that_does_not_exist_is_one_sentence(rank: Any) -> None:
    with pytest.raises(ConfigError, match="a whole number from 0 to 2, because this job has 3 members; got"):
        OneValue(None, rank).check(3)


def test_members_that_got_other_values_differ_in_their_loop_state() -> None:
    mine, other, late = SentValues(), SentValues(), SentValues()
    for value in (1, 2):
        assert mine.take(OneValue(value, 0).figures(0), CPU) == value
    other.take(OneValue(1, 0).figures(0), CPU)
    assert mine.state_dict() != other.state_dict()
    late.load_state_dict(other.state_dict())
    late.take(OneValue(2, 0).figures(0), CPU)
    assert late.state_dict() == mine.state_dict()


@given(data=st.data())
def test_the_member_of_the_rank_gives_the_value_or_else_the_nearest_lower_one_that_takes_part(
    data: st.DataObject,
) -> None:
    members = [f"m{i}" for i in data.draw(st.permutations(range(data.draw(st.integers(1, 5)))))]
    inside = data.draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
    rank = data.draw(st.integers(0, 6))
    shares = Shares("", 1)
    for place, member in enumerate(inside):
        shares.join(member, "")
        voters = members if data.draw(st.booleans()) else inside
        missing = set(voters) - set(inside[: place + 1])
        if missing:
            assert shares.giver(rank, members, voters) == ()
    for member in set(members) - set(inside):
        shares.stay_out(member)
    (giver,) = shares.giver(rank, members, members)
    assert giver in inside
    if rank < len(members) and members[rank] in inside:
        assert giver == members[rank]
    elif lower := [m for m in members[:rank] if m in inside]:
        assert giver == lower[-1]
    else:
        assert giver == next(m for m in members if m in inside)
    assert shares.hand_out({giver: AHEAD}) == [(giver, (0,), ())]
    assert shares.hand_out({giver: AHEAD}) == []


def test_an_evaluation_and_a_broadcast_at_the_same_place_are_one_sentence() -> None:
    shares = Shares(OneValue(None, 0).plan, 1)
    shares.join("m0", OneValue(None, 0).plan)
    shares.join("m1", OneValue(None, 1).plan)
    assert shares.problem == (
        "job.broadcast(…, from_rank=0) was called on one member and job.broadcast(…, from_rank=1) on m1: call the same "
        "on all members, with the same data"
    )
    assert shares.hand_out({"m0": AHEAD}) == []


def test_the_largest_value_fits_into_a_message() -> None:
    figures = OneValue(torch.zeros(VALUE_BYTES_MAX - 1000, dtype=torch.uint8), 0).figures(0)
    assert len(figures) + 1000 < Caps().max_body_bytes
