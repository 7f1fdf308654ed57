"""The planner: the plan with the shortest predicted step whose moves win back their cost. Pure.

Line-ups are estimated first. Then the timeline plays them, the most promising first, until no estimate of the rest is
better than what was played. Equal questions get equal answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from elastrain.job.run_plan import dealt
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan, held
from elastrain.pipeline.planner.chain_choice import ACTIONS, MORE_IN_FLIGHT, Chains
from elastrain.pipeline.planner.line_ups import LineUpOf, line_ups, re_routed, survivors
from elastrain.pipeline.planner.plan_room import PlanMemory, PlanRoom, Shortage, plan_name, shortage_text
from elastrain.pipeline.planner.step_costs import StepCosts
from elastrain.pipeline.planner.step_profile import JobProfile

TRIES = 8
"""Plans for which the exact account of memory is made, at the most."""
ROUNDING = 1e-9
"""Relative difference of equal seconds that were added in another order."""
FEW_CHAINS = 8
"""With at most so many pipelines, runs are moved from one to another until the slowest can give none away."""


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """All that the choice depends on."""

    members: tuple[str, ...]
    """Members of the view, in rank order."""
    graph: BlockGraph
    profile: JobProfile
    runs: int
    present: PipelinePlan | None = None
    run_length: int = 1
    memory: PlanMemory = field(default_factory=PlanMemory)
    steps_ahead: int = 1000
    """Steps before the next change is expected. Moves have to win back their cost in these."""
    pipelines: int | None = None
    """The number of pipelines that the first plan is to have (`--stages`), or None for any number."""
    least_members: int = 1
    """Members of each pipeline at the least, if enough are left. Members hold more in shorter pipelines."""
    more_in_flight: tuple[int, ...] = MORE_IN_FLIGHT
    """Candidates for in-flight limits: so many more than 1F1B has, the highest first."""


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """The chosen plan, the predicted seconds of its steps, and why it was chosen."""

    plan: PipelinePlan
    step_s: float
    reason: str


class NoPlanFitsError(ValueError):
    """An error for memory limits that no plan meets. It names the member, the part and the missing bytes."""


def choose_plan(question: PlanQuestion) -> PlanAnswer:
    """Choose the next plan. Raises NoPlanFitsError if no candidate fits into memory."""
    search = _Choice(question)
    best = search.best(None) if search.is_re_routed else None
    if best is not None and search.beats_re_routed(best):
        return best
    stay = search.stay()
    if best is None:
        best = search.best(stay)
    # Seconds that differ by rounding only are no reason to change the plan.
    elif stay is not None and stay.step_s <= search.score(best) * (1 + ROUNDING):
        best = stay
    if best is None:
        raise NoPlanFitsError(search.lack())
    if stay is None or best is stay:
        return best
    if search.score(best) >= stay.step_s * (1 - question.profile.noise):
        return replace(stay, reason=f"{stay.reason}; {best.reason} would gain less than the noise of the profile")
    return best


def choose_fitting(question: PlanQuestion, lacking: Callable[[PipelinePlan], Mapping[str, int]]) -> PlanAnswer:
    """Choose the next plan, of those that also have room by an exact account.

    Args:
        question: The question.
        lacking: Returns, for a plan, the bytes that members lack.

    Raises:
        NoPlanFitsError: If no candidate fits into memory, or none was found in `TRIES` attempts.
    """
    nearest: tuple[int, str] | None = None
    first = question
    for _ in range(TRIES):
        answer = choose_plan(question)
        # The plan in force has room: its members have decided so themselves.
        lacks = {} if answer.plan == question.present else lacking(answer.plan)
        if not lacks:
            return answer
        found = _nearest(first, answer.plan, lacks)
        nearest = min(nearest or found, found)
        base = {m: b + lacks.get(m, 0) for m, b in question.memory.base_bytes.items()}
        question = replace(question, memory=replace(question.memory, base_bytes=base))
    assert nearest is not None
    raise NoPlanFitsError(f"no plan was found that fits into memory: {nearest[1]}")


def _nearest(question: PlanQuestion, plan: PipelinePlan, lacks: Mapping[str, int]) -> tuple[int, str]:
    """Return the bytes that a plan lacks at most, and a clause with member, part, bytes and plan."""
    member = max(lacks, key=lambda m: lacks[m])
    room = PlanRoom(profile=question.profile, memory=question.memory, run_length=question.run_length)
    cuts = next(each.cuts for each in plan.pipelines if member in each.members)
    return lacks[member], shortage_text(member, lacks[member], room.largest_part(plan, member), plan_name(cuts))


@dataclass
class _Choice:
    question: PlanQuestion

    @cached_property
    def chains(self) -> Chains:
        asked = self.question
        room = PlanRoom(profile=asked.profile, memory=asked.memory, run_length=asked.run_length)
        return Chains(asked.graph, StepCosts(profile=asked.profile), room, asked.more_in_flight)

    @cached_property
    def before(self) -> Mapping[str, frozenset[int]]:
        return {} if self.question.present is None else held(self.question.present)

    @cached_property
    def staying(self) -> PipelinePlan | None:
        """The plan that moves no block, if there is one."""
        asked, plan = self.question, self.question.present
        if plan is None or plan.runs != asked.runs or set(asked.members) - set(plan.members):
            return None
        if set(plan.members) != set(asked.members):
            plan = re_routed(plan, asked.members)
        if plan is None or any(isinstance(self.chains.room.limits(each), Shortage) for each in plan.pipelines):
            return None
        return plan

    @property
    def is_re_routed(self) -> bool:
        """True if no block moves only where peers take the runs of lost members."""
        return self.staying is not None and self.staying != self.question.present

    def beats_re_routed(self, best: PlanAnswer) -> bool:
        """Return True if a plan beats the one in which peers take runs, whatever the timeline would say of that.

        Playing that one takes the longest, because its pipelines wait for each other.
        """
        assert self.staying is not None
        least_s = self._busiest_s(self.staying) + self.question.profile.rates.step_s
        return self.score(best) < least_s * (1 - self.question.profile.noise)

    def _busiest_s(self, plan: PipelinePlan) -> float:
        """Return the seconds for which the busiest member of a plan computes."""
        busy_s: dict[str, float] = defaultdict(float)
        first = 0
        for pipeline in plan.pipelines:
            # Where cuts differ from run to run, a part of the runs need not have the mean cut.
            kinds = 1 if all(isinstance(cut, int) for cut in pipeline.cuts) else pipeline.share
            known_s: dict[tuple[int, int, str], float] = {}
            for task in (task for run in range(kinds) for task in pipeline.route(first + run, first, plan.blocks)):
                key = (task.begin, task.end, task.member)
                if key not in known_s:
                    known_s[key] = self.chains.costs.whole_s(task)
                busy_s[task.member] += known_s[key] * pipeline.share / kinds
            first += pipeline.share
        return self.question.run_length * max(busy_s.values())

    def stay(self) -> PlanAnswer | None:
        """Return the plan that moves no block, if there is one and it is not too large to be played."""
        plan, reason = self.staying, "no block moves"
        if plan is None:
            return None
        if plan != self.question.present:
            reason = "no block moves: peers take the runs of lost members"
        # Re-routed pipelines wait for each other, so all of them are played. With many members that takes too long, and
        # a new cut costs no more than one publish.
        is_apart = len(plan.members) == sum(len(each.members) for each in plan.pipelines)
        if not is_apart and 3 * sum(each.share * len(each.members) for each in plan.pipelines) > ACTIONS:
            return None
        return PlanAnswer(plan=plan, step_s=self.chains.timeline.step_s(plan), reason=reason)

    def best(self, stay: PlanAnswer | None) -> PlanAnswer | None:
        """Return the best of all candidates, of which `stay` is one."""
        asked, best = self.question, stay
        found = line_ups(asked.present, asked.members, len(asked.graph.units))
        found = [each for each in found if min(map(len, each)) >= asked.least_members] or found
        if asked.present is None and asked.pipelines is not None:
            # A number of pipelines that no line-up has is no reason to have no plan.
            found = [each for each in found if len(each) == asked.pipelines] or found
        shares = [self._shares(line_up) for line_up in found]
        least_s = [max(map(self.chains.least_s, *pair)) for pair in zip(found, shares, strict=True)]
        # The most promising first: most of the others need not be played then. Of equals, the one that moves least.
        for at in sorted(range(len(found)), key=lambda i: (least_s[i], i)):
            limit_s = float("inf") if best is None else self.score(best)
            if least_s[at] >= limit_s or (best is not None and best is not stay and not self.chains.may_go_on):
                break
            planned = self._planned(found[at], shares[at], limit_s)
            # A tie keeps the earlier candidate, which moves less.
            if planned is not None and self.score(planned) < limit_s:
                best = planned
        return best

    def score(self, answer: PlanAnswer) -> float:
        """Return the seconds of a step, with its part of the cost of the plan's moves."""
        if self.question.present is None or not (sizes := self.question.profile.parameter_bytes):
            return answer.step_s
        none = frozenset[int]()
        taken = (sum(sizes[b] for b in its - self.before.get(m, none)) for m, its in held(answer.plan).items())
        cost_s = max(taken) / self.question.profile.rates.publish_bytes_per_s
        return answer.step_s + cost_s / self.question.steps_ahead

    def lack(self) -> str:
        """Return the sentence for memory limits that no plan meets."""
        found = self.chains.shortage
        if found is None:
            return f"no plan has a legal cut for each of {len(self.question.members)} members"
        clause = shortage_text(found.member, found.missing_bytes, found.part, found.plan)
        return f"no plan fits into memory: {clause}"

    def _shares(self, line_up: LineUpOf) -> list[int]:
        """Share the runs so that the slowest pipeline is as fast as possible, by estimates."""
        runs, chains = self.question.runs, self.chains
        places: dict[object, list[int]] = {}
        for index, chain in enumerate(line_up):
            places.setdefault(chains.class_of(chain), []).append(index)
        speed = {key: chains.speed(line_up[its[0]]) for key, its in places.items()}
        whole = sum(speed[key] * len(its) for key, its in places.items())
        # Most runs go by speed. The rest goes one by one to where it is done first, since longer chains take longer to
        # fill.
        spare = max(map(len, line_up)) - min(map(len, line_up)) + 2
        shares = [0] * len(line_up)
        for key, its in places.items():
            for index in its:
                shares[index] = max(0, int(runs * speed[key] / whole) - spare)
        return dealt(runs, list(places.values()), lambda at, share: chains.least_s(line_up[at], share), shares)

    def _planned(self, line_up: LineUpOf, shares: list[int], limit_s: float) -> PlanAnswer | None:
        """Return the best plan with this line-up. None if it does not fit, or is no better than `limit_s`."""
        asked, shares = self.question, list(shares)
        self.chains.has_peers = len(line_up) > 1
        while True:
            played = self._played(line_up, shares, limit_s if len(line_up) > FEW_CHAINS else float("inf"))
            if played is None:
                return None
            slowest = max(range(len(line_up)), key=lambda i: played[i][0])
            taker = self._taker(line_up, shares, slowest, played[slowest][0])
            if taker is None:
                break
            # Seconds grow with the runs, so moving single runs finds the best shares.
            shares[slowest], shares[taker] = shares[slowest] - 1, shares[taker] + 1
        pipelines = tuple(replace(p, members=m, share=n) for (_, p), m, n in zip(played, line_up, shares, strict=True))
        plan = PipelinePlan(blocks=len(asked.graph.blocks), pipelines=pipelines)
        step_s = played[slowest][0] + asked.profile.rates.step_s + self.chains.timeline.publish_s(plan, {})
        return PlanAnswer(plan=plan, step_s=step_s, reason=f"{self._name(line_up)}: {step_s:.3g} s a step")

    def _played(self, line_up: LineUpOf, shares: list[int], limit_s: float) -> list[tuple[float, Pipeline]] | None:
        """Return seconds and pipeline for each chain. Of equal chains the one with the most runs is played."""
        classes = [self.chains.class_of(chain) for chain in line_up]
        most: dict[object, int] = {}
        for at, key in enumerate(classes):
            if key not in most or shares[at] > shares[most[key]]:
                most[key] = at
        found: dict[object, tuple[float, Pipeline]] = {}
        for key, at in sorted(most.items(), key=lambda each: -self.chains.least_s(line_up[each[1]], shares[each[1]])):
            best = self.chains.best(line_up[at], shares[at])
            if best is None or best[0] >= limit_s:
                return None
            found[key] = best
        return [found[key] for key in classes]

    def _taker(self, line_up: LineUpOf, shares: list[int], slowest: int, most_s: float) -> int | None:
        """Return a pipeline that can take one more run and still be faster than the slowest one."""
        its = self.chains.class_of(line_up[slowest])
        for at, (chain, share) in enumerate(zip(line_up, shares, strict=True)):
            # An equal pipeline with as many runs would become as slow as the slowest is now.
            is_no_better = self.chains.class_of(chain) == its and share + 1 >= shares[slowest]
            if len(line_up) > FEW_CHAINS or not self.chains.may_go_on or is_no_better:
                continue
            if self.chains.least_s(chain, share + 1) < most_s:
                best = self.chains.best(chain, share + 1)
                if best is not None and best[0] < most_s:
                    return at
        return None

    def _name(self, line_up: LineUpOf) -> str:
        present, count = self.question.present, len(line_up)
        if present is not None and line_up == survivors(present, self.question.members):
            return "pipelines are cut anew" if count > 1 else "the pipeline is cut anew"
        return f"{count} pipelines of {min(map(len, line_up))} to {max(map(len, line_up))} members"
