"""Seconds of blocks, and memory: what this member measures, and what the votes of all members have told.

Measurements decide nothing by themselves. They reach the planner, and a plan takes effect through a record only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from statistics import median

from elastrain import protocol as p
from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_vote import PlanVote, ToldMemory
from elastrain.pipeline.planner.step_profile import RATE_NOISE, BlockSeconds, Gauge, Measured


class Measures:
    """The times of this member's blocks, and those that members of the view have told."""

    def __init__(self) -> None:
        self.told: dict[str, dict[int, BlockSeconds]] = {}
        """Member -> block of the graph -> seconds, as of its last votes."""
        self.memory: dict[str, ToldMemory] = {}
        """Member -> its memory, as of its last votes."""
        self.own_memory: ToldMemory | None = None
        """This member's memory, as it was last seen."""
        self._told_memory: ToldMemory | None = None
        self._now: dict[ActionKind, dict[int, list[float]]] = {}
        """Seconds of the open step, by kind of action and block."""
        self._gauges: dict[int, dict[ActionKind, Gauge]] = {}
        """Block -> kind -> the medians of the last steps."""
        self.told_rates: dict[str, dict[str, float]] = {}
        """Member -> what it has told of fixed times and links, by name."""
        self._rates: dict[str, Gauge] = defaultdict(lambda: Gauge(least_noise=RATE_NOISE))
        self._beside_s: list[float] = []
        """Seconds of each action of the open step that belong to none of its blocks."""
        self._waited_s: list[float] = []
        """Seconds before each action of the open step, or before several that are told together."""
        self._micro_batch = Gauge()
        """Seconds of a micro-batch without pipelines: the medians of the last steps."""
        self._is_full = False
        """True if this member's memory limit has no room for more runs."""
        self.begin()

    def note_step(self, micro_batch_s: float | None, *, has_room: bool = True) -> None:
        """Note the median time of a micro-batch in a step. None: this member computed none.

        `has_room`: it has memory for any share of the runs.
        """
        self._is_full = not has_room
        if micro_batch_s is None:  # it may take another time by now
            self._micro_batch = Gauge()
        else:
            self._micro_batch.add(micro_batch_s)

    def of_whole_runs(self) -> PlanVote | None:
        """Return this member's vote about shares of the runs. A change within the noise of its time does not show."""
        # The value in the vote follows the median only where that has changed by more than its noise.
        self._micro_batch.news()
        told_s = self._micro_batch.told
        return PlanVote(micro_batch_s=told_s, is_full=self._is_full) if told_s is not None or self._is_full else None

    def note(self, event: p.Computed) -> None:
        """Note how long an action took."""
        task, took_s = event.action.task, event.took_s
        waited_s, spent_s = event.host_s
        # A forward with the loss is told together with its backward. The thread's time for both is in the first event.
        self._beside_s.append(spent_s - sum(took_s))
        if spent_s:
            self._waited_s.append(waited_s)
        forward = self._now[ActionKind.FORWARD]
        if event.action.kind is ActionKind.FORWARD:
            for block, seconds in zip(task.blocks, took_s, strict=False):
                forward[block].append(seconds)
            return
        # One time for the whole task: it is divided among the blocks in proportion to their forwards.
        shares = {block: median(forward[block]) for block in task.blocks if forward[block]}
        whole_s = sum(shares.values())
        for block, share_s in shares.items() if took_s and whole_s else ():
            self._now[event.action.kind][block].append(took_s[0] * share_s / whole_s)

    def note_memory(self, memory: ToldMemory) -> None:
        """Note this member's memory."""
        self.own_memory = memory

    def begin(self) -> None:
        """Take the medians of the step before into the gauges, and begin to measure another step."""
        seen = {block for kind in self._now.values() for block in kind}
        # What a member has not computed for a whole step may take another time by now.
        self._gauges = {block: self._gauges.get(block) or defaultdict(Gauge) for block in seen}
        for kind, blocks in self._now.items():
            for block, seconds in blocks.items():
                if seconds:
                    self._gauges[block][kind].add(median(seconds))
        self._now = {kind: defaultdict(list) for kind in ActionKind}
        # Before its first action a member waits for the step. Before most others it waits for other members, but
        # somewhere in a step an action follows on another at once.
        if len(self._waited_s) > 1:
            # A device computes on while the thread submits more, so the thread's time may be the smaller one.
            beside_s = sum(self._beside_s) / len(self._beside_s)
            self._rates["step_s"].add(self._waited_s[0])
            self._rates["action_s"].add(max(0.0, beside_s) + min(self._waited_s[1:]))
        self._beside_s, self._waited_s = [], []

    def note_links(self, bytes_per_s: Mapping[str, float]) -> None:
        """Note the rates with which members' large frames came in during a step."""
        for member, rate in bytes_per_s.items():
            self._rates[member].add(rate)

    def forget_view(self, members: Collection[str]) -> None:
        """Forget the rates and the memory of lost members, and tell everything anew: newcomers have heard nothing.

        The seconds of a lost member's blocks stay: no other member may have measured these blocks.
        """
        self.told_rates = {member: its for member, its in self.told_rates.items() if member in members}
        self.memory = {member: its for member, its in self.memory.items() if member in members}
        self._told_memory = None
        for gauge in (*self._rates.values(), *(g for gauges in self._gauges.values() for g in gauges.values())):
            gauge.forget_told()

    def news(self, proposed: PipelinePlan | None) -> PlanVote:
        """Return a vote for `proposed` with what has changed by more than its noise. It counts as told then."""
        seconds = tuple(
            (block, _seconds(gauges))
            for block, gauges in sorted(self._gauges.items())
            # All gauges are asked, because each has to note what is told now.
            if {gauge.news() for gauge in gauges.values()} - {None}
        )
        news = ((name, gauge.news()) for name, gauge in sorted(self._rates.items()))
        rates = tuple((name, value) for name, value in news if value is not None)
        memory = self.own_memory
        if memory is not None and not memory.is_news(self._told_memory):
            memory = None
        self._told_memory = memory or self._told_memory
        return PlanVote(proposed=proposed, seconds=seconds, rates=rates, memory=memory)

    def hear(self, member: str, vote: PlanVote) -> bool:
        """Note what a member has told in its vote. Returns True if it told any times or rates."""
        self.told.setdefault(member, {}).update(vote.seconds)
        self.told_rates.setdefault(member, {}).update(vote.rates)
        if vote.memory is not None:
            self.memory[member] = vote.memory
        return bool(vote.seconds or vote.rates)

    def of(self, held: Mapping[str, Collection[int]]) -> Measured:
        """Return member -> block -> seconds, for the blocks that each member holds now: others may be outdated."""
        told = {member: self.told.get(member, {}) for member in held}
        return {m: {block: s for block, s in its.items() if block in held[m]} for m, its in told.items() if its}


def _seconds(gauges: dict[ActionKind, Gauge]) -> BlockSeconds:
    """Return a block's seconds. A whole backward takes as long for its input as for its parameters."""
    forward_s, back_s, weight_s = (median(gauges[kind].recent or [0.0]) for kind in ActionKind)
    if weight_s == 0.0:
        back_s = weight_s = back_s / 2
    return BlockSeconds(forward_s=forward_s, input_gradient_s=back_s, weight_gradient_s=weight_s)
