"""Causes that are named for a first difference, by what one process was started with besides the other."""

from __future__ import annotations

from typing import Any

import pytest

from elastrain.integrity.bit_causes import finding
from elastrain.integrity.bit_traces import ANYWHERE, DATA, OperatorCall, Recorded, Trace
from elastrain.integrity.checks import difference
from elastrain.job.values import Check


def recorded(loss: int, **event: Any) -> Recorded:
    told: dict[str, Any] = {name: event.pop(name) for name in ("changed", "sources") if name in event}
    called = OperatorCall(**{"module": "a", "what": "aten.mul.Tensor", **event})
    return Recorded(number=0, events=(called,), results={"loss": loss}, **told)


@pytest.mark.parametrize(
    ("factor", "event", "cause"),
    [
        ("order", {"draws": "own"}, "generator"),
        ("order", {"draws": "default"}, "reseeded"),
        ("order", {"draws": "default", "inputs": 2}, "memo"),
        ("nothing", {}, "kernel"),
        ("nothing", {"inputs": 2}, "outside"),
        ("nothing", {"inputs": 2, "sources": {"a": ["clock"]}}, "clock"),
        ("nothing", {"inputs": 2, "sources": {"b": ["clock"]}}, "outside"),
        ("nothing", {"module": DATA, "what": "batch"}, "outside"),
        ("order", {"inputs": 2, "sources": {"a": ["clock", "python random"]}}, "python random"),
        ("order", {"inputs": 2, "sources": {ANYWHERE: ["numpy generator"]}}, "numpy generator"),
        ("order", {"inputs": 2, "changed": {"a.n": "number", "b.t": "tensor"}}, "counter"),
        ("order", {"inputs": 2, "changed": {"b.t": "tensor"}}, "buffer"),
        ("order", {"inputs": 2}, "memo"),
        ("member", {"inputs": 2, "sources": {"a": ["rank"]}}, "rank"),
        ("member", {"inputs": 2}, "member"),
        ("hash", {"inputs": 2}, "hash order"),
        ("memory", {"inputs": 2}, "uninitialised"),
    ],
)
def test_a_cause_is_named_by_the_factor_and_by_the_first_operator(
    factor: str, event: dict[str, Any], cause: str
) -> None:
    one = Trace(threads=1, micro_batches=(recorded(0, **{**event, "inputs": 0}),))
    other = Trace(threads=1, micro_batches=(recorded(1, output=1, **event),))
    found = finding(one, other, lambda asked: other if asked == factor else one)
    assert found is not None
    assert (found.cause, found.module) == (cause, event.get("module", "a"))


def test_another_number_of_threads_is_named_if_the_operator_had_the_same_inputs() -> None:
    one = Trace(threads=1, micro_batches=(recorded(0),))
    other = Trace(threads=2, micro_batches=(recorded(1, output=1),))
    found = finding(one, other, lambda asked: other if asked == "member" else one)
    assert found is not None
    assert found.cause == "threads"


def test_the_sentence_of_a_failed_cross_check_names_the_command() -> None:
    told = {
        name: [Check(micro_batch=0, loss=loss, weight=1.0, digests=(1,))] for name, loss in (("a", 1.0), ("b", 2.0))
    }
    assert "`elastrain doctor --bits SCRIPT`" in difference(0, told, ("",))
