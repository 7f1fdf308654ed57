"""Shared evaluations: whatever comes in whichever order, each batch counts once, in the order of the batches."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.decisions.batch_shares import AHEAD, Shares
from elastrain.job.figures import Figure, Figures, FigureSum, read, written

names = st.text(max_size=4)
numbers = st.integers(-(1 << 62), 1 << 62) | st.floats()
figures = st.dictionaries(
    names,
    st.builds(Figure, st.none(), st.tuples(numbers))
    | st.lists(st.floats(), max_size=4).map(lambda each: Figure((len(each),), tuple(each))),
    min_size=1,
    max_size=3,
)


def batch(number: int) -> Figures:
    drawn = random.Random(number)
    return {"count": Figure(None, (1 << number,)), "loss": Figure((2,), (drawn.random() / 3, drawn.gauss(0, 1)))}


def in_order(count: int) -> Figures:
    total = batch(0)
    for number in range(1, count):
        total = {name: total[name] + each for name, each in batch(number).items()}
    return total


@given(told=figures)
def test_what_is_written_is_read_to_the_bit(told: Mapping[str, Figure]) -> None:
    assert repr(read(written(told))) == repr(dict(sorted(told.items())))  # repr: a NaN, and -0.0, are themselves


def test_whole_numbers_are_added_exactly_and_others_in_float64() -> None:
    tally = FigureSum(3)
    for number, value in enumerate([1 << 62, 0.1, 1 << 62]):
        tally.add(number, written({"n": Figure(None, (1 << 62,)), "loss": Figure(None, (value,))}))
    assert tally.total["n"].numbers == (3 << 62,)
    assert tally.total["loss"].numbers == (float(1 << 62) + 0.1 + float(1 << 62),)


@given(order=st.permutations(range(8)), again=st.lists(st.integers(0, 7)))
def test_the_sum_does_not_depend_on_the_order_in_which_batches_come_nor_on_those_that_come_twice(
    order: list[int], again: list[int]
) -> None:
    tally = FigureSum(8)
    for place, number in enumerate(order):
        assert not tally.is_complete
        tally.add(number, written(batch(number)))
        for each in again:
            if each in order[: place + 1]:
                tally.add(each, written(batch(each + 100)))  # by another member, say
        assert set(tally.missing()) == set(order[place + 1 :])
    assert tally.is_complete
    assert tally.total == in_order(8)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"n": Figure(None, (1,))}, "returned 'loss', 'n' for batch 0 and 'n' for batch 1"),
        (
            {"n": Figure(None, (1,)), "loss": Figure((2,), (1.0, 2.0))},
            "'loss' with shape () for batch 0 and with shape",
        ),
    ],
)
def test_batches_with_other_names_or_shapes_are_one_sentence(other: Figures, sentence: str) -> None:
    tally = FigureSum(3)
    tally.add(1, written(other))
    tally.add(0, written({"n": Figure(None, (1,)), "loss": Figure(None, (0.5,))}))
    tally.add(2, written({"n": Figure(None, (1,)), "loss": Figure(None, (0.5,))}))
    assert sentence in tally.problem
    assert not tally.is_complete


class Played:
    """Members that compute what a collector hands out, in an order drawn; now and then all but some are lost."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.count = data.draw(st.integers(1, 12))
        self.shares = Shares("", self.count)
        self.members = [f"m{i}" for i in range(data.draw(st.integers(1, 4)))]
        self.todo: dict[str, list[int]] = {}
        self.done: dict[str, list[int]] = {}

    def begin_view(self) -> None:
        """All say again that they take part, and what they have computed; only the collector has what others had."""
        self.shares.begin_view()
        self.todo = {member: [] for member in self.members}
        for member in self.members:
            self.shares.join(member, "")
            for number in self.done.setdefault(member, []):
                self.shares.take(member, number, written(batch(number)), "")

    def lose(self) -> None:
        """Lose members, and perhaps the collector with all that was handed in."""
        self.members = self.data.draw(st.lists(st.sampled_from(self.members), min_size=1, unique=True))
        if self.data.draw(st.booleans()):
            self.shares = Shares("", self.count)
        self.begin_view()

    def compute(self) -> None:
        """Hand out, and compute one batch."""
        for member, batches, _ in self.shares.hand_out():
            self.todo[member] += batches
        given = [number for batches in self.todo.values() for number in batches]
        assert len(set(given)) == len(given), "a batch is computed twice in one view"
        assert all(len(batches) <= AHEAD for batches in self.todo.values())
        busy = [member for member in self.members if self.todo[member]]
        assert busy, "nobody has anything to do, and it is not over"
        member = self.data.draw(st.sampled_from(busy))
        number = self.todo[member].pop(0)
        self.done[member].append(number)
        self.shares.take(member, number, written(batch(number)), "")


@given(data=st.data())
def test_every_batch_counts_once_whoever_is_lost(data: st.DataObject) -> None:
    played = Played(data)
    played.begin_view()
    losses = data.draw(st.integers(0, 3))
    while (result := played.shares.result(played.members)) is None:
        if losses and data.draw(st.booleans()):
            losses -= 1
            played.lose()
        else:
            played.compute()
    assert result == (written(in_order(played.count)), "")


def test_nothing_is_handed_out_after_a_failure_and_the_first_reason_counts() -> None:
    shares = Shares("9 samples", 9)
    shares.join("m0", "9 samples")
    shares.join("m1", "9 samples")
    (first, batches, _), _ = shares.hand_out()
    shares.take(first, batches[0], "", "it raised")
    shares.take("m1", 5, "", "it raised, too")
    assert shares.hand_out() == []
    assert shares.result(["m0", "m1"]) == ("", "it raised")
    assert shares.result(["m0", "m1", "m2"]) is None  # which may have a result


def test_evaluations_of_other_data_are_one_sentence() -> None:
    shares = Shares("9 samples in batches of 2", 5)
    shares.join("m0", "9 samples in batches of 2")
    shares.join("m1", "8 samples in batches of 2")
    assert "9 samples in batches of 2 was called on one member and 8 samples in batches of 2 on m1:" in shares.problem


def test_the_last_batches_are_handed_out_one_by_one() -> None:
    shares = Shares("", 4)
    for member in ("m0", "m1"):
        shares.join(member, "")
    assert shares.hand_out() == [("m0", (0, 1), ()), ("m1", (2,), ())]
