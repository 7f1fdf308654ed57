"""The metrics: names, kinds, help texts, labels, and their values in a state of a run. Pure functions.

The docs' table, the served text and the dashboard are made of this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elastrain.launcher.watch.now import is_over, recovering, shares

State = Mapping[str, Any]
Values = Iterator[tuple[tuple[str, ...], float]]
"""Values of the labels, and the value."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. A counter only rises within one life of a job; its served name ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    values: Callable[[State, float], Values]
    labels: tuple[str, ...] = ()
    unit: str = "short"
    """Unit of the dashboard."""

    @property
    def served_name(self) -> str:
        """The name as Prometheus reads it."""
        return f"elastrain_{self.name}_total" if self.kind == "counter" else f"elastrain_{self.name}"


def _job(field: str) -> Callable[[State, float], Values]:
    """Return the reader of a number of the job. None has no sample."""

    def read(state: State, _now: float) -> Values:
        if state[field] is not None:
            yield (), float(state[field])

    return read


def _members(field: str) -> Callable[[State, float], Values]:
    """Return the reader of a number of each member."""

    def read(state: State, _now: float) -> Values:
        for member in state["members"]:
            if member[field] is not None:
                yield (member["id"], member["node"]), float(member[field])

    return read


def _steps(state: State, _now: float) -> Values:
    if state["step"] is not None:
        yield (), float(state["step"] + 1)


def _share(state: State, _now: float) -> Values:
    share = shares(state)
    for member in state["members"]:
        if member["id"] in share:
            yield (member["id"], member["node"]), share[member["id"]]


def _in_view(state: State, _now: float) -> Values:
    yield (), float(sum(member["rank"] is not None and member["state"] != "gone" for member in state["members"]))


def _nodes(state: State, _now: float) -> Values:
    yield (), float(sum(node["state"] in ("here", "linked") for node in state["nodes"]))


def _window_shards(state: State, _now: float) -> Values:
    yield (), float(len(state["window"]["shards"]) if state["window"] else 0)


def _checkpoint_age(state: State, now: float) -> Values:
    if state["checkpoint_ago_s"] is not None:
        yield (), state["checkpoint_ago_s"] + max(0.0, now - state["at"])


def _seconds_or_0(field: str) -> Callable[[State, float], Values]:
    def read(state: State, _now: float) -> Values:
        yield (), float(state[field] or 0.0)

    return read


def _recovers(state: State, _now: float) -> Values:
    yield (), float(0 if is_over(state) else len(recovering(state)))


def _device_failures(state: State, _now: float) -> Values:
    for device in state["devices"]:
        yield (device["device"],), float(device["failures"])


_MEMBER = ("member", "node")
METRICS = (
    Metric(name="steps", kind="counter", help="Committed steps of the job.", values=_steps),
    Metric(
        name="steps_lost",
        kind="counter",
        help="Committed steps that had to be committed again.",
        values=_job("steps_lost"),
    ),
    Metric(
        name="redone", kind="counter", help="(block, run) pairs of pipelines computed again.", values=_job("redone")
    ),
    Metric(
        name="device_failures",
        kind="counter",
        help="Failures of a device.",
        values=_device_failures,
        labels=("device",),
    ),
    Metric(name="life", kind="gauge", help="Number of the job's life.", values=_job("life")),
    Metric(name="generation", kind="gauge", help="Generation of the view.", values=_job("generation")),
    Metric(name="until", kind="gauge", help="Step before which the loop ends.", values=_job("until")),
    Metric(name="loss", kind="gauge", help="Mean loss of the newest step.", values=_job("loss")),
    Metric(
        name="steps_per_minute",
        kind="gauge",
        help="Steps per minute, over the last minute.",
        values=_job("steps_per_minute"),
    ),
    Metric(
        name="remaining_seconds", kind="gauge", help="Expected time to the end.", values=_job("remaining_s"), unit="s"
    ),
    Metric(name="members", kind="gauge", help="Living members of the view.", values=_in_view),
    Metric(name="nodes", kind="gauge", help="Nodes whose agents answer.", values=_nodes),
    Metric(name="restarts_left", kind="gauge", help="Restarts that are left.", values=_job("restarts_left")),
    Metric(name="window_shards", kind="gauge", help="Shards with too few holders.", values=_window_shards),
    Metric(name="recovering", kind="gauge", help="Things that recover now.", values=_recovers),
    Metric(
        name="parked_seconds",
        kind="gauge",
        help="Time since the job is parked, or 0.",
        values=_seconds_or_0("parked_s"),
        unit="s",
    ),
    Metric(
        name="store_away_seconds",
        kind="gauge",
        help="Time since the store answers no more, or 0.",
        values=_seconds_or_0("store_away_s"),
        unit="s",
    ),
    Metric(name="checkpoint_step", kind="gauge", help="Step of the newest checkpoint.", values=_job("checkpoint")),
    Metric(
        name="checkpoint_age_seconds",
        kind="gauge",
        help="Age of the newest checkpoint.",
        values=_checkpoint_age,
        unit="s",
    ),
    Metric(name="member_step", kind="gauge", help="Newest step of a member.", values=_members("step"), labels=_MEMBER),
    Metric(
        name="member_share",
        kind="gauge",
        help="Share of the micro-batches, from 0 to 1.",
        values=_share,
        labels=_MEMBER,
        unit="percentunit",
    ),
    Metric(
        name="member_micro_batch_seconds",
        kind="gauge",
        help="Time of a micro-batch.",
        values=_members("micro_batch_s"),
        labels=_MEMBER,
        unit="s",
    ),
    Metric(
        name="member_memory_bytes",
        kind="gauge",
        help="Memory of a member.",
        values=_members("memory_bytes"),
        labels=_MEMBER,
        unit="bytes",
    ),
    Metric(
        name="member_memory_limit_bytes",
        kind="gauge",
        help="Memory limit of a member.",
        values=_members("memory_limit_bytes"),
        labels=_MEMBER,
        unit="bytes",
    ),
)
"""All metrics, in the order of the docs."""
UP_HELP = "1 if an agent of the run answers, else 0."
