"""The timeline: one step of pipelines, played by discrete events. `actions.choose` itself chooses the actions. Pure.

It knows in-flight limits, split backwards, messages and links. What follows when all members have computed (reduce,
commit, publish, moves) is added at the end. Of several equal pipelines one is played.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from elastrain.pipeline.actions import ActionKind, TaskAction, choose
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan, Route, Task
from elastrain.pipeline.planner.step_costs import StepCosts

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


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

    __slots__ = ("in_flight", "is_busy", "is_split", "limit", "queues", "seconds")

    def __init__(self, limit: int, is_split: bool) -> None:
        self.limit, self.is_split = limit, is_split
        self.is_busy = False
        self.in_flight: list[Task] = []
        self.queues: dict[ActionKind | int, list[tuple[int, int, Task, TaskAction]]] = {BACKWARD: [], WEIGHT: []}
        """By kind, and forwards by the cut at which they begin. `choose` needs only the first of each queue."""
        self.seconds: dict[tuple[ActionKind, int, int], float] = {}
        """(kind, begin, end) -> seconds of such an action: tasks that differ only in their run take equally long."""

    def splits(self, task: Task) -> bool:
        """Return True if the task's backward is split. First tasks have no input gradient, so theirs stays whole."""
        return self.is_split and task.begin > 0

    def queue(self, action: TaskAction) -> None:
        """Let an action be ready."""
        kind, micro_batch, task = action
        queue = self.queues.setdefault(task.begin, []) if kind is FORWARD else self.queues[kind]
        heappush(queue, (micro_batch, -task.begin, task, action))

    def take(self) -> TaskAction | None:
        """Take the action that `choose` wants next."""
        # The rule looks at the first of each queue only, so the others need not be handed to it.
        heads = [queue[0][3] for queue in self.queues.values() if queue]
        action = choose(heads, self.in_flight, self.limit) if heads else None
        if action is not None:
            kind, _, task = action
            if kind is FORWARD:
                heappop(self.queues[task.begin])
                self.in_flight.append(task)
            else:
                heappop(self.queues[kind])
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
    played: list[PlayedAction] | None = None
    """Actions in the order in which they begin. None: they are not kept."""
    finished_s: dict[str, float] = field(default_factory=dict)
    """Member -> when its last action ends."""
    begun: int = 0
    """Number of actions so far."""
    touched: dict[str, _Seat] = field(default_factory=dict)
    """Seats for which something has happened at the present time."""
    free_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """(from, to) -> when the link is free. Each direction is one queue."""
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
        events = self.events
        while events:
            now_s = self.now_s = events[0][0]
            # A member that ends an action at the moment when a gradient comes has to see that gradient.
            self.touched = {}
            # All that happens at one time comes before the next choices.
            while events and events[0][0] == now_s:
                _, _, action, has_ended = heappop(events)
                if has_ended:
                    seat = self.touched[action.task.member] = self.seats[action.task.member]
                    seat.is_busy = False
                    self._pass_on(action, seat)
                else:
                    self._arrive(action)
            for seat in self.touched.values():
                if not seat.is_busy:
                    self._start(seat)

    def _arrive(self, action: TaskAction) -> None:
        seat = self.touched[action.task.member] = self.seats[action.task.member]
        seat.queue(action)

    def _start(self, seat: _Seat) -> None:
        action = seat.take()
        if action is None:
            return
        seat.is_busy = True
        kind, _, task = action
        key = (kind, task.begin, task.end)
        seconds = seat.seconds.get(key)
        if seconds is None:
            seconds = seat.seconds[key] = self.costs.action_s(kind, task, is_split=seat.splits(task))
        end_s = self.finished_s[task.member] = self.now_s + seconds
        if self.played is not None:
            self.played.append(PlayedAction(self.now_s, end_s, action))
        self.begun += 1
        heappush(self.events, (end_s, self.begun, action, True))

    def _pass_on(self, action: TaskAction, seat: _Seat) -> None:
        """Let follow what an action makes possible."""
        kind, micro_batch, task = action
        if kind is FORWARD:
            deeper = self.beginning.get((task.run, task.end))
            if deeper is None:
                seat.queue(TaskAction(BACKWARD, micro_batch, task))
            else:
                self._send(TaskAction(FORWARD, micro_batch, deeper), task, self.costs.profile.activation_bytes)
            return
        if kind is BACKWARD:
            above = self.ending.get((task.run, task.begin))
            if above is not None:
                self._send(TaskAction(BACKWARD, micro_batch, above), task, self.costs.profile.gradient_bytes)
            # The previous member can go on. The gradients of the parameters wait for a bubble.
            if seat.splits(task):
                seat.queue(TaskAction(WEIGHT, micro_batch, task))
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
            hold_s = sizes[cut] / self.costs.link_bytes_per_s(*link)
            self.free_s[link] = max(self.now_s, self.free_s.get(link, 0.0)) + hold_s
            arrival_s = self.free_s[link] + self.costs.profile.rates.message_s
        # What takes no time comes now, before the next choices, and needs no event.
        if arrival_s > self.now_s:
            heappush(self.events, (arrival_s, action.micro_batch, action, False))
        else:
            self._arrive(action)


def play(plan: PipelinePlan, routes: Collection[Route], costs: StepCosts, run_length: int = 1) -> PlayedStep:
    """Play the routes of one step, by the plan's in-flight limits and split backwards."""
    actions: list[PlayedAction] = []
    finished_s = _finished_s(plan, routes, costs, run_length, actions)
    return PlayedStep(actions=tuple(actions), finished_s=finished_s)


def _finished_s(
    plan: PipelinePlan,
    routes: Collection[Route],
    costs: StepCosts,
    run_length: int,
    actions: list[PlayedAction] | None = None,
) -> Mapping[str, float]:
    """Play a step. Returns when each member has ended its last action. `actions`: takes all actions."""
    seats = {member: _Seat(limit, member in plan.split) for member, limit in plan.limits.items()}
    player = _Player(costs, run_length, seats, played=actions, finished_s=dict.fromkeys(seats, 0.0))
    player.play(routes)
    return player.finished_s


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
            finished_s = _finished_s(plan, routes, self.costs, self.run_length)
            rate = self.costs.profile.rates.reduce_bytes_per_s if has_peers else float("inf")
            stretches = {m: stretch for p, _ in group for m, stretch in p.stretches(blocks).items()}
            # A member sends its sums when it has computed, and does not wait for its peers.
            reduced_s = {m: self.costs.bytes_of(*stretch) / rate for m, stretch in stretches.items()}
            self.known_s[key] = max(finished_s[m] + reduced_s[m] for m in stretches)
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
