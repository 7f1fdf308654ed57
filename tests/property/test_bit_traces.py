"""The first difference between two records of micro-batches, and the factor that shows it, for random records."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastrain.integrity.bit_causes import ADVICE, FACTORS, finding
from elastrain.integrity.bit_traces import (
    OperatorCall,
    Recorded,
    Trace,
    difference,
    difference_by_place,
    first_difference,
)

EVENTS = st.builds(
    OperatorCall,
    module=st.sampled_from(("a", "b.c", "the model")),
    what=st.sampled_from(("aten.add.Tensor", "aten.mm.default", "batch")),
    way=st.sampled_from(("forward", "backward", "recomputed")),
    output=st.integers(0, 9),
    inputs=st.integers(0, 9),
    draws=st.sampled_from(("", "", "own", "default")),
)
CHANGED = st.dictionaries(st.sampled_from(("a.x", "b.c.y")), st.sampled_from(("number", "tensor", "thing")))
SOURCES = st.dictionaries(st.sampled_from(("a", "b.c", "")), st.lists(st.sampled_from(("clock", "rank", "entropy"))))
RECORDS = st.builds(
    Recorded,
    number=st.integers(0, 2),
    events=st.lists(EVENTS, min_size=1, max_size=6).map(tuple),
    results=st.fixed_dictionaries({"loss": st.integers(0, 9)}),
    changed=CHANGED,
    sources=SOURCES,
)
TRACES = st.builds(Trace, threads=st.integers(1, 2), micro_batches=st.lists(RECORDS, min_size=1, max_size=3).map(tuple))


@given(TRACES)
def test_a_trace_is_read_as_it_was_written(trace: Trace) -> None:
    assert Trace.from_json(trace.to_json()) == trace


@given(RECORDS, st.data())
def test_the_first_changed_event_is_named_and_what_does_not_reach_the_results_is_none(
    one: Recorded, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(one.events) - 1))
    later = [replace(event, output=event.output + data.draw(st.integers(0, 1))) for event in one.events[at + 1 :]]
    changed = replace(one.events[at], output=one.events[at].output + 1)
    other = replace(one, events=(*one.events[:at], changed, *later))
    assert difference(one, other) is None
    found = difference(one, replace(other, results={"loss": -1}))
    assert found is not None
    assert (found.at, found.same_inputs, found.same_way) == (one.events[at], True, True)


@given(RECORDS)
def test_results_that_differ_behind_equal_events_are_named(one: Recorded) -> None:
    found = difference(one, replace(one, results={**one.results, "weight": 1}))
    assert found is not None
    assert found.at.what == "weight"


@given(TRACES, st.permutations(range(3)))
def test_the_order_of_micro_batches_is_no_difference(trace: Trace, order: list[int]) -> None:
    first = {each.number: each for each in reversed(trace.micro_batches)}
    kept = [first[number] for number in order if number in first]
    again = replace(trace, micro_batches=(*kept, kept[0]))
    assert first_difference(again, replace(again, micro_batches=tuple(reversed(kept)))) is None
    assert difference_by_place(again, again) is None


@given(TRACES, st.sampled_from(FACTORS), st.integers(1, 2))
def test_the_first_factor_that_makes_a_difference_is_told_with_advice(one: Trace, factor: str, threads: int) -> None:
    one = replace(one, micro_batches=one.micro_batches[:1])
    other_batch = replace(one.micro_batches[0], results={"loss": -1})
    other = Trace(threads=threads, micro_batches=(other_batch,))
    asked = []

    def control(name: str) -> Trace:
        asked.append(name)
        return other if name == factor else one

    assert finding(one, one, control) is None
    assert not asked
    found = finding(one, other, control)
    assert found is not None
    assert found.factor == factor
    assert found.advice == ADVICE[found.cause]
    assert tuple(asked) == FACTORS[: FACTORS.index(factor) + 1]
    alone = finding(one, other, lambda name: one)
    assert alone is not None
    assert alone.factor == "several"
