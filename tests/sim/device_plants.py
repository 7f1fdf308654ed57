"""Planted bugs about outstanding runs: a loop on a device gets its next run while its present one still lands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from elastrain.buffers.slots import GradientSlots, UsedSlot
from elastrain.member.integrity.cross_checks import CrossCheck
from elastrain.member.loop_stages import LoopStages
from elastrain.member.state.runs import Runs
from tests.sim.checks import Truth
from tests.sim.cluster import Cluster, Scenario
from tests.sim.plants import _FLIPS, PLANTS, Filter, Plant, Rule, Slipped, _any, _name, _rule


class OnDevice(Cluster):
    """A job whose members have devices. No drive keeps activations there."""

    def __init__(self, scenario: Scenario, seed: int, truth: Truth | None) -> None:
        super().__init__(replace(scenario, device=True, unread=0), seed, truth)


class SlippedOnDevice(Slipped):
    """One member's device computes wrongly, and every run is audited: steps begin anew."""

    slips_at_once = 1

    def __init__(self, scenario: Scenario, seed: int, truth: Truth | None) -> None:
        super().__init__(replace(scenario, device=True, unread=0), seed, truth)


def _on_device(within: int, part: type, name: str, only: Filter = _any, cluster: type[Cluster] = OnDevice) -> Any:
    """Return a plant like that of `_rule`, in a job on devices."""

    def register(function: Rule) -> Rule:
        _rule(within, part, name, only)(function)
        PLANTS[_name(function)] = replace(PLANTS[_name(function)], cluster=cluster)
        return function

    return register


_AUDITED: Filter = lambda scenario: scenario.members > 2 and scenario.backups > 0 and scenario.runs > 4  # noqa: E731


def _keeps_the_second(outstanding: Any) -> None:
    for each in list(outstanding)[1:]:
        if each is not None:
            each.is_void = False


@_on_device(60, Runs, "begin", _AUDITED, SlippedOnDevice)
def counts_the_second_run_of_a_void_attempt(rule: Rule, runs: Runs, step: int) -> None:
    """Nothing that is outstanding counts once its step begins anew, whatever its number."""
    rule(runs, step)
    _keeps_the_second(getattr(runs, "outstanding", ()))


@_on_device(300, GradientSlots, "void_step", _FLIPS)
def keeps_the_second_slot_of_a_void_attempt(rule: Rule, slots: GradientSlots) -> None:
    """No outstanding slot holds a partial of a step that begins anew."""
    rule(slots)
    _keeps_the_second(slots._outstanding)


@_on_device(20, GradientSlots, "start_run", lambda scenario: scenario.runs > scenario.members)
def reuses_a_slot_that_lands(rule: Rule, slots: GradientSlots) -> Any:
    """A run gets no slot of a run that has not landed."""
    last = slots._outstanding[-1] if slots._outstanding else None
    if last is None:
        return rule(slots)
    slots._outstanding.append(UsedSlot(last.slot))
    return last.slot


@_on_device(20, LoopStages, "_give_run", lambda scenario: scenario.runs > scenario.members)
def hands_out_again_what_is_outstanding(rule: Rule, stages: LoopStages) -> None:
    """An outstanding run is not given to the loop again."""
    pending = stages._open.runs.pending
    if stages._views.is_recovering or not pending:
        rule(stages)
    else:
        stages._give(stages._open.audits.compute(stages._open.check.compute(pending[0])))


@_on_device(60, Runs, "end_running", lambda scenario: scenario.runs > scenario.members)
def ends_the_newest_run(rule: Rule, runs: Runs) -> Any:
    """The oldest outstanding run is the one that has landed."""
    runs.outstanding.rotate(1)
    return rule(runs)


@_on_device(60, LoopStages, "feed")
def leaves_while_runs_land(rule: Rule, stages: LoopStages) -> bool:
    """The loop leaves a step when everything that it has submitted has landed."""
    outstanding, runs = stages._open.runs.outstanding, stages._open.runs
    is_over = stages._commit.record is not None and stages.step == stages._commit.step
    runs.outstanding = type(outstanding)() if is_over else outstanding
    try:
        return bool(rule(stages))
    finally:
        runs.outstanding = outstanding


@_on_device(200, Runs, "hand", lambda scenario: scenario.crashes + scenario.hunts + scenario.joins > 0)
def gives_away_what_is_outstanding(rule: Rule, runs: Runs, todo: Any) -> None:
    """An outstanding run stays with its member when runs are handed out again."""
    rule(runs, [run for run in todo if run not in runs.running[1:]])


@_on_device(200, CrossCheck, "next_run", lambda scenario: scenario.check_every > 0 and scenario.runs < scenario.members)
def counts_the_first_of_two_checks(rule: Rule, check: CrossCheck) -> int | None:
    """A member that computes a check twice votes with the second result."""
    awaited, check._awaited = check._awaited, set()
    try:
        run: int | None = rule(check)
        return run
    finally:
        check._awaited = awaited


PLANTS["SubmitsWithoutEnd"] = Plant(
    rule="No more runs are outstanding than the device has memory for.",
    within=20,
    only=lambda scenario: scenario.runs > 2 * scenario.members,
    cluster=OnDevice,
    patch=lambda: patch("elastrain.member.loop_stages.OUTSTANDING_MOST", 9),
)
