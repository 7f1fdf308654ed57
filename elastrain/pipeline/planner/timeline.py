"""The timeline: one step of pipelines, played by discrete events. `actions.choose` itself chooses the actions. Pure.

It knows in-flight limits, split backwards, messages and links. What follows when all members have computed (reduce,
commit, publish, moves) is added at the end. Of several equal pipelines one is played.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from elastrain.pipeline.actions import ActionKind, TaskAction, choose
from elastrain.pipeline.pipeline_plan import Bound, Pipeline, PipelinePlan, Route, Task
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

    def loads(self, pipeline: Pipeline) -> list[tuple[float, float, float]]:
        """Return, per member, its mean seconds of forward, backward and weight gradient for one micro-batch."""
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


class PlayedAction(NamedTuple):
    """An action as it was played."""

    begin_s: float
    end_s: float
    action: TaskAction


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """Pipelines as they were played, up to the last gradient."""

    actions: tuple[PlayedAction, ...]
    finished_s: Mapping[str, float]
    """Member -> when its last action ended."""


class _Seat:
    """A member that computes one action at a time."""

    __slots__ = ("backwards", "forwards", "in_flight", "is_busy", "is_split", "limit", "weights")

    def __init__(self, limit: int, is_split: bool) -> None:
        self.limit, self.is_split = limit, is_split
        self.is_busy = False
        self.in_flight: list[Task] = []
        self.forwards: dict[int, list[tuple[int, Task, TaskAction]]] = {}
        """By cut: the queue of forwards that begin there. `choose` needs only the first of each."""
        self.backwards: list[tuple[int, int, Task, TaskAction]] = []
        self.weights: list[tuple[int, int, Task, TaskAction]] = []

    def splits(self, task: Task) -> bool:
        """Return True if the task's backward is split. First tasks have no input gradient, so theirs stays whole."""
        return self.is_split and task.begin > 0

    def queue(self, action: TaskAction) -> None:
        """Let an action be ready."""
        if action.kind is FORWARD:
            heappush(self.forwards.setdefault(action.task.begin, []), (action.micro_batch, action.task, action))
        else:
            queue = self.backwards if action.kind is BACKWARD else self.weights
            heappush(queue, (action.micro_batch, -action.task.begin, action.task, action))

    def take(self) -> TaskAction | None:
        """Take the action that `choose` wants next."""
        # The rule looks at the first of each queue only, so the others need not be handed to it.
        heads = [each[0][-1] for each in (self.backwards, self.weights) if each]
        heads += [each[0][-1] for each in self.forwards.values() if each]
        action = choose(heads, self.in_flight, self.limit) if heads else None
        if action is not None:
            if action.kind is FORWARD:
                heappop(self.forwards[action.task.begin])
                self.in_flight.append(action.task)
            else:
                heappop(self.backwards if action.kind is BACKWARD else self.weights)
        return action


@dataclass
class _Player:
    """One step of pipelines while it is played."""

    costs: StepCosts
    run_length: int
    seats: dict[str, _Seat]
    now_s: float = 0.0
    events: list[tuple[float, int, TaskAction, bool]] = field(default_factory=list)
    """(time, order, action, True if it has ended, False if its input has come)"""
    played: list[PlayedAction] = field(default_factory=list)
    free_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """(from, to) -> when the link is free. Each direction is one queue."""
    known_s: dict[object, float] = field(default_factory=dict)
    beginning: dict[tuple[int, int], Task] = field(default_factory=dict)
    """(run, cut) -> the task that begins there."""
    ending: dict[tuple[int, int], Task] = field(default_factory=dict)
    """(run, cut) -> the task that ends there."""

    def play(self, routes: Iterable[Route]) -> None:
        """Play the step to its last gradient."""
        for route in routes:
            self.beginning.update({(task.run, task.begin): task for task in route})
            self.ending.update({(task.run, task.end): task for task in route})
            for micro_batch in range(route[0].run * self.run_length, (route[0].run + 1) * self.run_length):
                self.seats[route[0].member].queue(TaskAction(FORWARD, micro_batch, route[0]))
        for seat in self.seats.values():
            self._start(seat)
        while self.events:
            self.now_s = self.events[0][0]
            # A member that ends an action at the moment when a gradient comes has to see that gradient.
            touched: dict[str, _Seat] = {}
            # All that happens at one time comes before the next choices.
            while self.events and self.events[0][0] == self.now_s:
                _, _, action, has_ended = heappop(self.events)
                seat = touched[action.task.member] = self.seats[action.task.member]
                if has_ended:
                    seat.is_busy = False
                    self._pass_on(action, seat)
                else:
                    seat.queue(action)
            for seat in touched.values():
                if not seat.is_busy:
                    self._start(seat)

    def _start(self, seat: _Seat) -> None:
        action = seat.take()
        if action is None:
            return
        seat.is_busy = True
        # Tasks that differ only in their run take equally long.
        task = action.task
        key = (action.kind, task.begin, task.end, task.member)
        seconds = self.known_s.get(key)
        if seconds is None:
            seconds = self.known_s[key] = self.costs.action_s(action.kind, task, is_split=seat.splits(task))
        end_s = self.now_s + seconds
        self.played.append(PlayedAction(self.now_s, end_s, action))
        heappush(self.events, (end_s, len(self.played), action, True))

    def _pass_on(self, action: TaskAction, seat: _Seat) -> None:
        """Let follow what an action makes possible."""
        kind, task = action.kind, action.task
        if kind is FORWARD:
            deeper = self.beginning.get((task.run, task.end))
            if deeper is None:
                seat.queue(TaskAction(BACKWARD, action.micro_batch, task))
            else:
                self._send(TaskAction(FORWARD, action.micro_batch, deeper), task, self.costs.profile.activation_bytes)
            return
        if kind is BACKWARD:
            above = self.ending.get((task.run, task.begin))
            if above is not None:
                self._send(TaskAction(BACKWARD, action.micro_batch, above), task, self.costs.profile.gradient_bytes)
            # The previous member can go on. The gradients of the parameters wait for a bubble.
            if seat.splits(task):
                seat.queue(TaskAction(WEIGHT, action.micro_batch, task))
                return
        # The saved activations of a micro-batch stay until its last gradient.
        seat.in_flight.remove(task)

    def _send(self, action: TaskAction, source: Task, sizes: Sequence[int]) -> None:
        """Send the input of an action. A member that hands on to itself sends nothing."""
        task, arrival_s = action.task, self.now_s
        # After a loss two neighbouring tasks may be computed by the same member.
        if task.member != source.member:
            link = (source.member, task.member)
            cut = task.begin if action.kind is FORWARD else task.end
            # Each direction of a link is a queue of its own, as cables and sockets are.
            hold_s = sizes[cut] and sizes[cut] / self.costs.link_bytes_per_s(*link)
            self.free_s[link] = max(self.now_s, self.free_s.get(link, 0.0)) + hold_s
            arrival_s = self.free_s[link] + self.costs.profile.rates.message_s
        heappush(self.events, (arrival_s, action.micro_batch, action, False))


def play(plan: PipelinePlan, routes: Collection[Route], costs: StepCosts, run_length: int = 1) -> PlayedStep:
    """Play the routes of one step, by the plan's in-flight limits and split backwards."""
    seats = {member: _Seat(limit, member in plan.split) for member, limit in plan.limits.items()}
    player = _Player(costs, run_length, seats)
    player.play(routes)
    finished_s = dict.fromkeys(seats, 0.0)
    for each in player.played:
        member = each.action.task.member
        finished_s[member] = max(finished_s[member], each.end_s)
    return PlayedStep(actions=tuple(player.played), finished_s=finished_s)


@dataclass
class Timeline:
    """Predicted steps of plans under one profile. Pipelines that are equal are played once."""

    costs: StepCosts
    run_length: int = 1
    known_s: dict[object, float] = field(default_factory=dict)
    """Key of pipelines -> seconds until they have computed, and their gradients are reduced."""

    def step_s(self, plan: PipelinePlan, taken_bytes: Mapping[str, int] | None = None) -> float:
        """Return the seconds of one step. `taken_bytes`: member -> bytes of blocks that it gets with this commit."""
        firsts = accumulate((pipeline.share for pipeline in plan.pipelines), initial=0)
        placed = list(zip(plan.pipelines, firsts, strict=False))
        # Where members stand in several pipelines, one waits for the other.
        is_apart = len(plan.members) == sum(len(pipeline.members) for pipeline in plan.pipelines)
        groups = [[each] for each in placed] if is_apart else [placed]
        computed_s = max(self.computed_s(group, plan.blocks, len(plan.pipelines) > 1) for group in groups)
        return computed_s + self.costs.profile.rates.step_s + self.publish_s(plan, taken_bytes or {})

    def publish_s(self, plan: PipelinePlan, taken_bytes: Mapping[str, int]) -> float:
        """Return the seconds until every member has the parameters of its blocks, and of those that it takes."""
        stretches = {stretch for pipeline in plan.pipelines for stretch in pipeline.stretches(plan.blocks).values()}
        most_bytes = max(self.costs.bytes_of(*stretch) for stretch in stretches) if len(plan.members) > 1 else 0
        rate = self.costs.profile.rates.publish_bytes_per_s
        return most_bytes / rate + max(taken_bytes.values(), default=0) / rate

    def computed_s(self, group: Sequence[tuple[Pipeline, int]], blocks: int, has_peers: bool) -> float:
        """Return the seconds until pipelines that share members have computed and reduced.

        Args:
            group: The pipelines, each with its first run.
            blocks: Blocks of the model.
            has_peers: True if other members have the same blocks, so gradients have to be reduced.
        """
        key = (self.key(group), blocks, has_peers)
        if key not in self.known_s:
            routes = [p.route(run, first, blocks) for p, first in group for run in range(first, first + p.share)]
            plan = PipelinePlan(blocks=blocks, pipelines=tuple(pipeline for pipeline, _ in group))
            played = play(plan, routes, self.costs, self.run_length)
            rate = self.costs.profile.rates.reduce_bytes_per_s if has_peers else float("inf")
            stretches = {m: stretch for p, _ in group for m, stretch in p.stretches(blocks).items()}
            # A member sends its sums when it has computed, and does not wait for its peers.
            reduced_s = {m: self.costs.bytes_of(*stretch) / rate for m, stretch in stretches.items()}
            self.known_s[key] = max(played.finished_s[m] + reduced_s[m] for m in stretches)
        return self.known_s[key]

    def key(self, group: Sequence[tuple[Pipeline, int]]) -> object:
        """Return a value that is equal for pipelines that take equally long: members are known by place and speed."""
        places: dict[str, int] = {}
        found: list[object] = []
        for pipeline, first in group:
            for member in pipeline.members:
                places.setdefault(member, len(places))
            # Groups of runs begin at multiples of their size, so the first run counts modulo 4.
            # Whole cuts do not depend on the run, so the place of the pipeline in the plan does not count.
            phase = 0 if all(isinstance(cut, int) for cut in pipeline.cuts) else first % 4
            how = (pipeline.cuts, pipeline.limits, pipeline.is_split, pipeline.share, phase)
            found.append((*how, self.chain_key(pipeline.members)))
            if len(group) > 1:
                found.append(tuple(places[member] for member in pipeline.members))
        return tuple(found)

    def chain_key(self, members: Sequence[str]) -> object:
        """Return the speeds of members in a row, and the rates of the links between them."""
        speeds, link = self.costs.profile.speeds, self.costs.link_bytes_per_s
        return (
            tuple(speeds.get(member, 1.0) for member in members),
            tuple(link(a, b) for a, b in pairwise(members)),
        )
