"""Seconds of actions, links and publishes on each member, as they follow from a profile. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.pipeline_plan import Bound, Pipeline, Task
from elastrain.pipeline.planner.step_profile import JobProfile

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of actions, links and publishes that follow from a profile, with sums over stretches made once."""

    profile: JobProfile

    @cached_property
    def _sums(self) -> dict[ActionKind, tuple[float, ...]]:
        blocks = self.profile.blocks
        seconds = {
            FORWARD: [each.forward_s for each in blocks],
            BACKWARD: [each.input_gradient_s for each in blocks],
            WEIGHT: [each.weight_gradient_s for each in blocks],
        }
        return {kind: tuple(accumulate(each, initial=0.0)) for kind, each in seconds.items()}

    @cached_property
    def cumulated(self) -> tuple[float, ...]:
        """Per cut: seconds of all actions of the blocks before it."""
        return tuple(map(sum, zip(*self._sums.values(), strict=True)))

    def action_s(self, kind: ActionKind, task: Task, *, is_split: bool) -> float:
        """Return the seconds of an action on its member. `is_split`: the task's backward is split."""
        sums = self._sums[kind]
        seconds = sums[task.end] - sums[task.begin]
        if kind is BACKWARD and not is_split:
            seconds += self._sums[WEIGHT][task.end] - self._sums[WEIGHT][task.begin]
        elif kind is not FORWARD:
            seconds *= 1 + self.profile.rates.split_price
        return seconds / self.profile.speeds.get(task.member, 1.0) + self.profile.rates.action_s

    def whole_s(self, task: Task) -> float:
        """Return the seconds of a micro-batch's forward and whole backward on its member: no split takes less."""
        # A split one takes an action more.
        kinds = (FORWARD, BACKWARD)
        return sum(self.action_s(kind, task, is_split=False) for kind in kinds)

    def loads(self, pipeline: Pipeline) -> list[tuple[float, float, float]]:
        """Return, per member, its mean seconds of forward, backward and weight gradient for one micro-batch."""
        # Pipelines that differ in their limits only take equally long.
        key = (pipeline.members, pipeline.cuts, pipeline.is_split)
        if key not in self._loads:
            self._loads[key] = self._counted_loads(pipeline)
        return self._loads[key]

    @cached_property
    def _loads(self) -> dict[object, list[tuple[float, float, float]]]:
        return {}

    def _counted_loads(self, pipeline: Pipeline) -> list[tuple[float, float, float]]:
        sums, rates = tuple(self._sums.values()), self.profile.rates
        begins = [tuple(_mean(each, cut) for each in sums) for cut in (0, *pipeline.cuts, len(self.profile.blocks))]
        found = list[tuple[float, float, float]]()
        for member, begin, end in zip(pipeline.members, begins, begins[1:], strict=False):
            speed = self.profile.speeds.get(member, 1.0)
            forward_s, back_s, weight_s = ((b - a) / speed for a, b in zip(begin, end, strict=True))
            price = 1 + rates.split_price
            halves = (back_s * price + rates.action_s, weight_s * price + rates.action_s)
            # A task that begins with the batch has no input gradient, so its backward stays whole.
            is_split = pipeline.is_split and bool(found)
            found.append(
                (forward_s + rates.action_s, *(halves if is_split else (back_s + weight_s + rates.action_s, 0.0)))
            )
        return found

    def hops(self, pipeline: Pipeline) -> list[tuple[float, float]]:
        """Return, per link of the pipeline, the seconds of an activation and of a gradient."""
        found, message_s = list[tuple[float, float]](), self.profile.rates.message_s
        for cut, (one, other) in zip(pipeline.cuts, pairwise(pipeline.members), strict=True):
            rate, at = self.link_bytes_per_s(one, other), cut if isinstance(cut, int) else cut.cut
            there, back = self.profile.activation_bytes[at], self.profile.gradient_bytes[at]
            found.append((there / rate + message_s, back / rate + message_s))
        return found

    def link_bytes_per_s(self, one: str, other: str) -> float:
        """Return the rate of the link between two members."""
        # A timeline asks for every message.
        if (known := self._link_rates.get((one, other))) is None:
            known = self._link_rates[one, other] = self._link_rate(one, other)
        return known

    @cached_property
    def _link_rates(self) -> dict[tuple[str, str], float]:
        return {}

    def _link_rate(self, one: str, other: str) -> float:
        for a, b, rate in self.profile.rates.links:
            if {a, b} == {one, other}:
                return rate
        nodes, rates = self.profile.nodes, self.profile.rates
        return rates.inside_bytes_per_s if nodes.get(one) == nodes.get(other) else rates.between_bytes_per_s

    def bytes_of(self, begin: int, end: int) -> int:
        """Return the bytes of the parameters of a stretch."""
        return sum(self.profile.parameter_bytes[begin:end])


def _mean(sums: Sequence[float], cut: int | Bound) -> float:
    if isinstance(cut, int):
        return sums[cut]
    return sums[cut.cut] + (sums[cut.deeper] - sums[cut.cut]) * cut.deep / cut.groups
