"""The best bounds and in-flight limits of one chain of members, by its class: equal chains are looked at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from math import comb

from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.pipeline_plan import Cuts, Pipeline
from elastrain.pipeline.planner.bounds import Divisible, fractional_cuts, whole_cuts
from elastrain.pipeline.planner.plan_room import PlanRoom, Shortage, plan_name
from elastrain.pipeline.planner.step_costs import StepCosts
from elastrain.pipeline.planner.timeline import Timeline
from elastrain.pipeline.planning import one_f_one_b

MORE_IN_FLIGHT = (8, 4, 2, 1, 0)
"""Candidates for in-flight limits: so many more than 1F1B has."""
GROUP_SIZES = (1, 4)
FEW_CUTS = 24
"""All whole cuts of a chain are candidates if there are at most so many."""
ACTIONS = 12_000
"""Actions that the timeline plays for one question, after which no further candidate is begun."""
Chain = tuple[str, ...]


@dataclass
class Chains:
    """Chains of members under one profile, with what is known of each class of equal ones."""

    graph: BlockGraph
    costs: StepCosts
    room: PlanRoom
    more_in_flight: tuple[int, ...] = MORE_IN_FLIGHT
    has_peers: bool = True
    spent: int = 0
    """Actions played so far."""
    shortage: Shortage | None = None
    """The least that a pipeline lacked that does not fit."""
    _wholes: dict[object, tuple[Cuts, ...]] = field(default_factory=dict)
    _estimates: dict[object, float] = field(default_factory=dict)
    _best: dict[object, tuple[float, Pipeline] | None] = field(default_factory=dict)
    _classes: dict[Chain, object] = field(default_factory=dict)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline that plays candidates."""
        return Timeline(self.costs, self.room.run_length)

    @property
    def may_go_on(self) -> bool:
        """True until the timeline has played enough for one question."""
        return self.spent <= ACTIONS

    def class_of(self, chain: Chain) -> object:
        """Return a value that is equal for chains of equal members and links."""
        if chain not in self._classes:
            limits, base = self.room.memory.limits_bytes, self.room.memory.base_bytes
            room = tuple(limits[member] - base.get(member, 0) if member in limits else None for member in chain)
            self._classes[chain] = (self.timeline.chain_key(chain), room)
        return self._classes[chain]

    def speed(self, chain: Chain) -> float:
        """Return the sum of the members' speeds."""
        return sum(self.costs.profile.speeds.get(member, 1.0) for member in chain)

    def least_s(self, chain: Chain, share: int) -> float:
        """Return an estimate from below of the seconds of the chain with so many runs. Infinite if it does not fit."""
        key = (self.class_of(chain), share)
        if key not in self._estimates:
            found = [estimated_s(self.costs, each, self.room.run_length) for each in self._options(chain, share, (1,))]
            self._estimates[key] = min(found, default=float("inf"))
        return self._estimates[key]

    def best(self, chain: Chain, share: int) -> tuple[float, Pipeline] | None:
        """Return the least seconds of the chain with so many runs, and how. None if nothing fits."""
        key = (self.class_of(chain), share, self.has_peers)
        if key not in self._best:
            self._best[key] = self._searched(chain, share)
        return self._best[key]

    def _searched(self, chain: Chain, share: int) -> tuple[float, Pipeline] | None:
        n = self.room.run_length
        options = [(estimated_s(self.costs, each, n), at, each) for at, each in enumerate(self._options(chain, share))]
        best: tuple[float, Pipeline] | None = None
        begun = self.spent
        for least_s, _, pipeline in sorted(options, key=lambda each: each[:2]):
            actions = 3 * share * n * len(chain)
            # No class of chains may use up what others need.
            is_much = self.spent + actions > min(ACTIONS, begun + ACTIONS // 8)
            if best is not None and (least_s > best[0] or is_much):
                break
            self.spent += actions
            seconds = self.timeline.computed_s([(pipeline, 0)], len(self.graph.blocks), self.has_peers)
            # Of equally fast pipelines the one whose members keep least in memory.
            if best is None or (seconds, sum(pipeline.limits)) < (best[0], sum(best[1].limits)):
                best = (seconds, pipeline)
        return best

    def _options(self, chain: Chain, share: int, sizes: tuple[int, ...] = GROUP_SIZES) -> list[Pipeline]:
        """Return the candidates for bounds, limits and splits that fit into memory, the highest limits first."""
        speeds = [self.costs.profile.speeds.get(member, 1.0) for member in chain]
        cuts = list(self._whole(chain, speeds, share))
        for size in sizes if len(chain) > 1 else ():
            bounds = fractional_cuts(self._divisible, speeds, -(-share // size), size)
            # Where all bounds round to cuts, the whole cuts are the same candidate.
            if bounds is not None and bounds not in cuts:
                cuts.append(bounds)
        found: list[Pipeline] = []
        # More than all runs in flight is no other candidate.
        more_in_flight = {min(more, share * self.room.run_length) for more in self.more_in_flight}
        if len(sizes) < len(GROUP_SIZES):
            more_in_flight = {max(more_in_flight)}
        for each in cuts:
            for more, is_split in product(sorted(more_in_flight, reverse=True), self._splits(chain)):
                limits = tuple(limit + more for limit in one_f_one_b(len(chain)))
                wanted = Pipeline(members=chain, cuts=each, share=share, limits=limits, is_split=is_split)
                fitting = self._fitting(wanted)
                if fitting is not None and fitting not in found:
                    found.append(fitting)
        return found

    def _splits(self, chain: Chain) -> tuple[bool, ...]:
        """Return whether backwards may be whole, or split. Only a split with a price can cost more than it gains."""
        if len(chain) == 1 or not self.room.memory.may_split:
            return (False,)
        rates = self.costs.profile.rates
        return (False, True) if rates.split_price or rates.action_s else (True,)

    def _fitting(self, pipeline: Pipeline) -> Pipeline | None:
        limits = self.room.limits(pipeline)
        if not isinstance(limits, Shortage):
            return replace(pipeline, limits=limits)
        # The plan that lacks least is the one that a user can reach with the smallest change.
        if self.shortage is None or limits.missing_bytes < self.shortage.missing_bytes:
            self.shortage = replace(limits, plan=plan_name(pipeline.cuts))
        return None

    def _whole(self, chain: Chain, speeds: list[float], share: int) -> tuple[Cuts, ...]:
        found = self._cut(chain, speeds, None)
        # The memory of members is looked at in the search only where it binds: that search depends on the share.
        limits = tuple(range(len(chain), 0, -1))
        for cuts in found[:1] if self.room.memory.limits_bytes and len(found) == 1 else ():
            pipeline = Pipeline(members=chain, cuts=cuts, share=share, limits=limits, is_split=False)
            if isinstance(self.room.limits(pipeline), Shortage):
                return self._cut(chain, speeds, share) or found
        return found

    def _cut(self, chain: Chain, speeds: list[float], share: int | None) -> tuple[Cuts, ...]:
        """Return the whole cuts that are candidates. `share`: runs for which there has to be memory, if given."""
        key = (self.class_of(chain), share)
        if key not in self._wholes:
            inner, more = self.graph.legal_cuts, len(chain) - 1
            # With few runs the fill of the pipeline counts as much as the costliest member, so all cuts are tried. The
            # number of cuts explodes with the number of members, so larger chains get the closed form.
            if comb(len(inner), more) <= FEW_CUTS:
                self._wholes[key] = tuple(combinations(inner, more))
            else:
                found = whole_cuts(
                    self._divisible, speeds, lambda k, a, b: share is None or self._fits(chain[k], a, b, share)
                )
                self._wholes[key] = () if found is None else (found,)
        return self._wholes[key]

    def _fits(self, member: str, begin: int, end: int, share: int) -> bool:
        most = self.room.most_in_flight(member, (begin, end), share)
        return not isinstance(most, Shortage)

    @cached_property
    def _divisible(self) -> Divisible:
        points = self.graph.points
        return Divisible(points=points, seconds=tuple(self.costs.cumulated[point] for point in points))


def estimated_s(costs: StepCosts, pipeline: Pipeline, run_length: int) -> float:
    """Return about the least seconds of a pipeline: of its busiest member, the way to it, and the way back."""
    count = pipeline.share * run_length
    if not count:
        return 0.0
    loads, hops = costs.loads(pipeline), costs.hops(pipeline)
    fill, drain = [0.0], [0.0]
    for (forward_s, back_s, _), (there_s, here_s) in zip(loads, hops, strict=False):
        fill.append(fill[-1] + forward_s + there_s)
        drain.append(drain[-1] + back_s + here_s)
    # The first gradient comes to a member when all forwards of the way, and the backwards behind it, are done.
    whole_s = fill[-1] + loads[-1][0]
    total_back_s = drain[-1] + loads[-1][1]
    found = 0.0
    for place, (forward_s, back_s, weight_s) in enumerate(loads):
        first_s = whole_s + total_back_s - drain[place] - back_s - (hops[place - 1][1] if place else 0.0)
        waits_s = max(0.0, first_s - fill[place] - min(count, pipeline.limits[place]) * forward_s)
        rest_s = count * (forward_s + back_s) + max(drain[place], count * weight_s)
        found = max(found, fill[place] + waits_s + rest_s)
    return found
