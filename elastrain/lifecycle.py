"""The step protocol of one member: a state machine without I/O and clock, `event -> commands`.

Compute, fold, reduce, commit, apply, publish; and after any change of view: report, complete the highest committed
step, resume. ARCHITECTURE.md follows one failure through it. A driver carries the commands out in order and feeds the
results back; the simulator and the worker's engine are two drivers of the same class.

The methods named `_may_…` and `_is_…` are the rules that keep the bits; each has a planted bug in tests/sim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.attempt import Attempt, Finished, Weight
from elastrain.fold import Fold, Node
from elastrain.messages import (
    Ack,
    Copied,
    Copy,
    Digests,
    Done,
    Gradient,
    LoopState,
    Message,
    Partial,
    Publish,
    Record,
    Report,
    Vote,
)
from elastrain.placement import Holders, Placement, next_roles, target
from elastrain.plan import plan
from elastrain.recovery import Lost, Recovery, Shape, decide, is_covered
from elastrain.voting import Disagreement, combine_votes
from elastrain.world import View

NEVER = -2
"""Version of what was never there; -1 is what the job starts with."""


@dataclass
class Held:
    """A shard's state in this member's hands."""

    version: int = NEVER
    """The step after which it stands, verified (or its own work as primary)."""
    kept: dict[int, Finished] = field(default_factory=dict)
    """Finished gradients by step, until their update is verified."""
    scratch: dict[int, int] = field(default_factory=dict)
    """Step -> digest of the update made behind, not yet verified."""
    expected: dict[int, int] = field(default_factory=dict)
    """Step -> the primary's digest."""
    owed: dict[int, str] = field(default_factory=dict)
    """Step -> the primary that waits for an acknowledgement."""


class Lifecycle:
    """One member's part in the job."""

    def __init__(self, *, me: str, shape: Shape, copy_budget_bytes: int = 8 << 20) -> None:
        self.me = me
        self.shape = shape
        self.copy_budget_bytes = copy_budget_bytes
        self.view: View | None = None
        self.newest: View | None = None
        self.committed = -1
        self.record: Record | None = None
        self.base: Placement | None = None
        self._now: tuple[Holders, ...] = ()
        self._my_shards: list[int] = []
        self.goal: Placement = ()
        self.parameters = [NEVER] * len(shape.shards)
        self._missing: set[int] | None = None
        self.held: dict[int, Held] = {}
        self.bound: set[int] = set()
        self.begun = -1
        self.entered = False
        self.recovering = True
        self.attempt = self._new_attempt(0)
        self._out: list[p.Command] = []
        self._reports: dict[str, Report] = {}
        self._later: list[p.Arrived] = []
        self._deferred: list[p.RunDone] = []
        self._whole: list[int] = []
        self._allowed: frozenset[int] = frozenset()
        self._ready = False
        self._settings = ""
        self._loop_state: tuple[int, str] | None = None
        self._newcomers: tuple[str, ...] = ()
        self._copying: dict[tuple[int, str], int] = {}
        self._copies: list[tuple[int, str]] = []
        self._copied_bytes = 0
        self._followers: dict[int, set[str]] = defaultdict(set)
        self._digesting = False
        self._dropping: set[int] = set()
        self._finishing: int | None = None
        self._done: set[str] = set()
        self._over = False

    # --------------------------------------------------------------------------------------------------- the one entry

    def handle(self, event: p.Event) -> list[p.Command]:
        """Take one event in; the commands are to be carried out in order before the next event."""
        if self._over:
            return []
        match event:
            case p.Viewed():
                self._on_view(event.view)
            case p.Arrived():
                self._on_arrival(event)
            case p.Began():
                self._on_began(event)
            case p.Ready():
                self._ready = True
                self._end_run()
            case p.RunDone():
                self._on_run_done(event)
            case p.Finished():
                self._on_finished(event)
            case p.AppliedBehind():
                self._on_applied_behind(event)
            case p.Digested():
                self._on_digested(event)
            case p.TookCopy():
                self._on_took_copy(event)
            case p.Finishing():
                self._finishing = event.step
                self._say_done()
            case p.Ended():
                self._over = True
                self._do(p.Leave())
        self._progress()
        out, self._out = self._out, []
        return out

    def _do(self, command: p.Command) -> None:
        self._out.append(command)

    def _send(self, to: str, message: Message) -> None:
        self._out.append(p.Send(to=to, message=message))

    def _fail(self, kind: str, reason: str) -> None:
        self._out.append(p.Fail(kind=kind, reason=reason))
        self._over = True

    @property
    def _others(self) -> list[str]:
        return [m for m in self.view.ids if m != self.me] if self.view else []

    @property
    def now(self) -> tuple[Holders, ...]:
        """Who holds what in this view: the committed holders that live."""
        return self._now

    @now.setter
    def now(self, holders: tuple[Holders, ...]) -> None:
        self._now = holders
        self._my_shards = [shard for shard, h in enumerate(holders) if h.primary == self.me]

    def _mine(self) -> list[int]:
        return self._my_shards

    def _new_attempt(self, step: int) -> Attempt:
        return Attempt(step=step, fold=Fold(self.shape.runs), blocks=self.shape.blocks)

    # ----------------------------------------------------------------------------------------------------------- views

    def _on_view(self, view: View) -> None:
        if self.newest is not None and view.generation <= self.newest.generation:
            return
        if self.me not in view:
            if self.view is not None:  # a newcomer is not in the views before its own
                self._do(p.Leave(evicted=True))
                self._over = True
            return
        self.newest = view
        if self._must_switch_now(view) or self._is_left_behind():
            self._switch()

    def _must_switch_now(self, view: View) -> bool:
        """A view that only adds members waits for the commit whose record names it, for everyone alike."""
        return self.view is None or bool(set(self.view.ids) - set(view.ids))

    def _is_left_behind(self) -> bool:
        """One of this view has gone on to a view that this member knows: nothing can be committed here without it.

        A newcomer has not gone on, it begins there: its report waits for the commit that lets it in.
        """
        view, newest = self.view, self.newest
        assert view is not None
        assert newest is not None
        return any(view.generation < a.generation <= newest.generation and a.source in view for a in self._later)

    def _switch(self) -> None:
        """Stop reading anything of older generations, and say where this member stands."""
        assert self.newest is not None
        self.view = self.newest
        self.recovering = True
        self.attempt.forget_view()
        self._reports = {}
        self._copying.clear()
        self._followers.clear()
        for held in self.held.values():
            held.owed.clear()
        self._done.clear()
        self._later = [a for a in self._later if not self._is_stale(a)]
        self._do(p.Edit(view=self.view))
        report = self._report()
        self._allowed = frozenset(report.pending[: report.fixed])
        self._reports[self.me] = report
        for member in self._others:
            self._send(member, report)
        self._replay_later()

    def _report(self) -> Report:
        attempt = self.attempt
        under_way = 1 if attempt.running is not None else 0
        return Report(
            committed=self.committed,
            record=self.record,
            base=self.base,
            parameters=tuple(self.parameters),
            held=tuple((s, h.version, self._gradients_of(s)) for s, h in sorted(self.held.items())),
            begun=self.begun if self.entered else -1,
            finishing=self._finishing is not None,
            pending=tuple(attempt.pending),
            fixed=min(len(attempt.pending), 1 + under_way),
            own=tuple(tuple(sorted(partials.nodes)) for partials in attempt.own),
            folded=tuple((s, lane, tuple(sorted(f.nodes))) for (s, lane), f in sorted(attempt.folds.items())),
        )

    def _gradients_of(self, shard: int) -> tuple[int, ...]:
        """Steps whose finished gradient is here, kept as a backup or folded as the primary."""
        folded = {self.attempt.step} if shard in self.attempt.finished else set()
        return tuple(sorted({*self.held[shard].kept, *folded}))

    # -------------------------------------------------------------------------------------------------------- messages

    def _is_stale(self, arrival: p.Arrived) -> bool:
        return self.view is not None and arrival.generation < self.view.generation

    def _on_arrival(self, arrival: p.Arrived) -> None:
        if self._is_stale(arrival):
            return
        if self.view is None or arrival.generation > self.view.generation:
            if self.newest is None or arrival.generation > self.newest.generation:
                self._do(p.ReadView(generation=arrival.generation))
            self._later.append(arrival)
            if self.view is not None and self._is_left_behind():
                self._switch()
        elif isinstance(arrival.message, Report):
            self._on_report(arrival.source, arrival.message)
        elif self._is_early(arrival.message):
            self._later.append(arrival)
        else:
            self._dispatch(arrival)

    def _is_early(self, message: Message) -> bool:
        """Whether the message belongs to a state that this member reaches later, on its own or by another message."""
        if self.recovering:
            return True
        match message:
            case Partial() | Gradient() | Ack() | Vote():
                return message.step > self.committed + 1
            case Digests() | Copy() | Copied():
                return message.step > self.committed
            case _:
                return False

    def _replay_later(self) -> None:
        waiting, self._later = self._later, []
        for arrival in waiting:
            if not self._over:
                self._on_arrival(arrival)

    def _dispatch(self, arrival: p.Arrived) -> None:
        message, source = arrival.message, arrival.source
        match message:
            case Partial():
                self._on_partial(message, arrival.payload)
            case Gradient():
                self._on_gradient(source, message, arrival.payload)
            case Ack():
                if message.step == self.attempt.step:
                    for shard in message.shards:
                        self.attempt.acks.setdefault(shard, set()).add(source)
            case Vote():
                if message.step == self.attempt.step:
                    self.attempt.votes[source] = message
            case Publish():
                self._on_publish(message, arrival.payload)
            case Digests():
                self._on_digests(message)
            case Copy():
                if message.step == self.committed:
                    self._do(p.TakeCopy(step=message.step, shard=message.shard, payload=arrival.payload, source=source))
            case Copied():
                self._on_copied(source, message)
            case LoopState():
                self._loop_state = (message.step, message.state)
            case Done():
                self._done.add(source)

    # ------------------------------------------------------------------------------------------------ compute and fold

    def _on_began(self, event: p.Began) -> None:
        self.begun = event.step
        self.entered = True
        self._settings = event.settings
        self._loop_state = (event.step, event.state)

    def _end_run(self) -> None:
        attempt = self.attempt
        if attempt.running is not None:
            attempt.end(attempt.running)

    def _on_run_done(self, event: p.RunDone) -> None:
        if event.step != self.attempt.step:
            return
        if self.recovering:
            self._deferred.append(event)
            return
        own = self.attempt.own[event.block]
        goal = self.attempt.target_of(event.run)
        weight = (event.contribution, event.touched)
        for step in own.add((event.run, event.run + 1), weight, within=goal) or ():
            self._do(p.CombineOwn(step=event.step, block=event.block, combine=step))
        self._deliver_unsent()

    def _deliver_unsent(self) -> None:
        for block, node in list(self.attempt.unsent()):
            self.attempt.sent.add((block, node))
            self._deliver(block, node)

    def _deliver(self, block: int, node: Node, covered: dict[tuple[int, int], frozenset[Node]] | None = None) -> None:
        """Send a partial to the primaries of the block's shards, less those that have it already."""
        weight = self.attempt.own[block].weight(node)
        lanes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for shard, lane in self._lanes_of(block):
            if covered is None or not is_covered(node, covered[shard, lane]):
                lanes[self.now[shard].primary].append((shard, lane))
        for primary, wanted in lanes.items():
            if primary == self.me:
                self._fold_in(block, node, weight, wanted, None)
                continue
            self._send(
                primary,
                Partial(
                    step=self.attempt.step,
                    block=block,
                    node=node,
                    contribution=weight[0],
                    touched=weight[1],
                    lanes=tuple(wanted),
                ),
            )

    def _lanes_of(self, block: int) -> Iterable[tuple[int, int]]:
        for shard, shape in enumerate(self.shape.shards):
            for lane, lane_block in enumerate(shape.lanes):
                if lane_block == block:
                    yield shard, lane

    def _on_partial(self, message: Partial, payload: object) -> None:
        if message.step == self.attempt.step:
            weight = (message.contribution, message.touched)
            self._fold_in(message.block, message.node, weight, message.lanes, payload)

    def _fold_in(
        self, block: int, node: Node, weight: Weight, lanes: Iterable[tuple[int, int]], payload: object
    ) -> None:
        for index, (shard, lane) in enumerate(lanes):
            partials = self.attempt.fold_of(shard, lane)
            steps = partials.add(node, weight)
            if steps is None:
                continue
            self._do(
                p.Keep(
                    step=self.attempt.step, shard=shard, lane=lane, node=node, payload=payload, index=index, block=block
                )
            )
            for step in steps:
                self._do(p.CombineShard(step=self.attempt.step, shard=shard, lane=lane, combine=step))
            if partials.complete and self._is_folded(shard):
                self._whole.append(shard)

    def _finish_folds(self) -> None:
        whole, self._whole = self._whole, []
        if whole:
            self._do(p.Finish(step=self.attempt.step, shards=tuple(whole)))

    def _is_folded(self, shard: int) -> bool:
        lanes = range(len(self.shape.shards[shard].lanes))
        return all((shard, n) in self.attempt.folds and self.attempt.folds[shard, n].complete for n in lanes)

    def _on_finished(self, event: p.Finished) -> None:
        if event.step != self.attempt.step:
            return
        root = self.attempt.fold.root
        for shard, square_norm in event.square_norms.items():
            lanes = range(len(self.shape.shards[shard].lanes))
            weights = [self.attempt.folds[shard, lane].weight(root) for lane in lanes]
            self.attempt.finished[shard] = Finished(
                contribution=weights[0][0], touched=tuple(w[1] for w in weights), square_norm=square_norm
            )
        if not self.recovering:
            self._forward_gradients(event.square_norms)

    # --------------------------------------------------------------------------------------- backups of the gradient

    def _forward_gradients(self, shards: Iterable[int], only: str | None = None) -> None:
        """Send finished gradients to backups and followers."""
        wanted: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            for member in {*self.now[shard].backups, *self._followers[shard]}:
                if only in (None, member):
                    wanted[member].append(shard)
        for member, their in sorted(wanted.items()):
            done = [self.attempt.finished[shard] for shard in their]
            self._send(
                member,
                Gradient(
                    step=self.attempt.step,
                    shards=tuple(their),
                    contribution=done[0].contribution,
                    touched=tuple(f.touched for f in done),
                    square_norms=tuple(f.square_norm for f in done),
                ),
            )

    def _on_gradient(self, source: str, message: Gradient, payload: object) -> None:
        if message.step != self.attempt.step:
            return
        for index, shard in enumerate(message.shards):
            held = self._held(shard)
            held.kept[message.step] = Finished(
                message.contribution, message.touched[index], message.square_norms[index]
            )
            self._do(p.StoreGradient(step=message.step, shard=shard, payload=payload, index=index))
            held.owed[message.step] = source
        self._acknowledge(message.shards)

    def _may_acknowledge(self, held: Held, step: int) -> bool:
        """A backup answers for `step` only when its state of the step before is verified."""
        return held.version == step - 1

    def _acknowledge(self, shards: Iterable[int]) -> None:
        step = self.attempt.step
        by_primary: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            held = self.held[shard]
            if step in held.owed and self._may_acknowledge(held, step):
                by_primary[held.owed.pop(step)].append(shard)
        for primary, acked in by_primary.items():
            self._send(primary, Ack(step=step, shards=tuple(acked)))

    # ------------------------------------------------------------------------------------------------ vote and commit

    def _vote(self) -> None:
        attempt = self.attempt
        if attempt.voted or not self._may_vote():
            return
        assert self.newest is not None
        mine = self._mine()
        vote = Vote(
            step=attempt.step,
            seen=self.newest.generation,
            contribution=attempt.finished[mine[0]].contribution if mine else None,
            square_norms=tuple((s, attempt.finished[s].square_norm) for s in mine),
            roles=tuple(self._proposed_roles(mine)),
            settings=self._settings,
        )
        attempt.voted = True
        attempt.votes[self.me] = vote
        for member in self._others:
            self._send(member, vote)

    def _may_vote(self) -> bool:
        attempt = self.attempt
        return (
            not self.recovering
            and self.begun == attempt.step
            and not self._digesting
            and not self._copying
            and self._parameters_are_here()
            and all(self._is_safe(shard) for shard in self._mine())
        )

    def _is_safe(self, shard: int) -> bool:
        """Finished, on state of the step before, and acknowledged by all who keep a copy or are about to."""
        attempt, holders = self.attempt, self.now[shard]
        waiting_for = {*holders.backups, *self._followers[shard]}
        return (
            shard in attempt.finished
            and self.held[shard].version == self.committed
            and waiting_for <= attempt.acks.get(shard, set())
        )

    def _proposed_roles(self, mine: Iterable[int]) -> Iterable[tuple[int, Holders]]:
        assert self.base is not None
        for shard in mine:
            ready = {self.me, *self.attempt.acks.get(shard, set())}
            after = next_roles(self.now[shard], self.goal[shard], ready)
            if after != self.base[shard]:
                yield shard, after

    def _commit(self) -> None:
        attempt, view = self.attempt, self.view
        if view is None or self.recovering or not set(attempt.votes) >= set(view.ids):
            return
        record = combine_votes(attempt.step, view, [attempt.votes[m] for m in view.ids])
        if isinstance(record, Disagreement):
            self._fail("DivergedError", record.reason)
        else:
            self._pass(record)

    # ----------------------------------------------------------------------------------------- pass, apply and publish

    def _pass(self, record: Record) -> None:
        """This member holds the record: the step can not be undone any more."""
        mine = self._mine()
        before = self.now
        touched = {s: self.attempt.finished[s].touched for s in mine}
        self._learn(record)
        if mine:
            self._do(p.Apply(record=record, shards=tuple(mine), touched=touched))
        for shard in mine:
            self._applied(shard)
        self._apply_behind(record, set(mine))
        self._change_roles(record, before)
        self._do(p.EndAttempt(step=record.step))
        self.attempt = self._new_attempt(record.step + 1)
        if record.switch and not self.recovering:
            self._switch()
        elif not self.recovering:
            assert self.view is not None
            self.attempt.hand(plan(self.view.ids, self.shape.runs)[self.me])
            self._publish(dict.fromkeys(self._others, tuple(mine)), record)
            self._compute_digests(mine, before)
            self._replay_later()

    def _learn(self, record: Record) -> None:
        self.record = record
        self.committed = record.step
        self._missing = None
        self._copied_bytes = 0
        self._do(p.Passed(record=record))

    def _applied(self, shard: int) -> None:
        held = self.held[shard]
        held.version = self.committed
        held.kept = {step: kept for step, kept in held.kept.items() if step > self.committed}
        held.scratch.clear()
        held.expected.clear()
        self.bound.add(shard)
        self._have_parameters(shard)

    def _apply_behind(self, record: Record, mine: set[int]) -> None:
        for shard in sorted(set(self.held) - mine):
            held = self.held[shard]
            if record.step in held.kept:
                touched = held.kept[record.step].touched
                self._do(p.ApplyBehind(record=record, shard=shard, touched=touched))
            else:  # a copy that was not followed up is stale from now on
                self._drop(shard)

    def _change_roles(self, record: Record, before: tuple[Holders, ...]) -> None:
        assert self.base is not None
        base, now = list(self.base), list(self.now)
        for shard, holders in record.roles:
            base[shard] = now[shard] = holders
        self.base, self.now = tuple(base), tuple(now)
        for shard, holders in record.roles:
            if self.me == before[shard].primary != holders.primary and self.me in holders.backups:
                self.bound.discard(shard)
                self._do(p.Unbind(shard=shard))
            if shard in self.held and self.me not in holders.all:
                self._dropping.add(shard)
            self._followers[shard] -= set(holders.all)
        if record.roles:
            self._plan_copies()

    def _publish(self, shards_by_member: dict[str, tuple[int, ...]], record: Record | None) -> None:
        """Every publish carries the record: whoever receives it has passed."""
        for member, shards in shards_by_member.items():
            if shards and member != self.me:
                self._send(member, Publish(step=self.committed, record=record, shards=shards))

    def _on_publish(self, message: Publish, payload: object) -> None:
        if message.record is not None and message.step == self.committed + 1:
            self._pass(message.record)
        if self._may_take(message):
            for index, shard in enumerate(message.shards):
                if shard not in self.bound:
                    self._do(p.TakeParameters(step=message.step, shard=shard, payload=payload, index=index))
                    self._have_parameters(shard)

    def _may_take(self, message: Publish) -> bool:
        """Parameters of a step never overwrite older ones before its record is held."""
        return message.step == self.committed

    def _parameters_are_here(self) -> bool:
        if self._missing is None:
            self._missing = {shard for shard, version in enumerate(self.parameters) if version != self.committed}
        return not self._missing

    def _have_parameters(self, shard: int) -> None:
        self.parameters[shard] = self.committed
        if self._missing is not None:
            self._missing.discard(shard)

    # ------------------------------------------------------------------------------------------- backups behind

    def _held(self, shard: int) -> Held:
        return self.held.setdefault(shard, Held())

    def _compute_digests(self, shards: Iterable[int], before: tuple[Holders, ...]) -> None:
        wanted = tuple(s for s in shards if self._compares_with(s, before))
        if wanted:
            self._digesting = True
            self._do(p.ComputeDigests(step=self.committed, shards=wanted))
        else:
            self._drop_given_away()

    def _compares_with(self, shard: int, before: tuple[Holders, ...]) -> set[str]:
        """Who compares its copy of this shard with ours."""
        members = {*before[shard].all, *self.now[shard].all, *self._followers[shard]}
        return members & set(self._others)

    def _on_digested(self, event: p.Digested) -> None:
        self._digesting = False
        if event.step != self.committed or self.recovering:
            return
        digests = tuple(sorted(event.digests.items()))
        for member in self._others:
            self._send(member, Digests(step=event.step, digests=digests))
        self._drop_given_away()

    def _drop_given_away(self) -> None:
        for shard in sorted(self._dropping):
            self._drop(shard)

    def _drop(self, shard: int) -> None:
        self._dropping.discard(shard)
        self.bound.discard(shard)
        if self.held.pop(shard, None) is not None:
            self._do(p.Drop(shard=shard))

    def _on_digests(self, message: Digests) -> None:
        for shard, digest in message.digests:
            held = self.held.get(shard)
            if held is not None and shard not in self.bound and held.version < message.step:
                held.expected[message.step] = digest
                self._verify(shard, message.step)

    def _on_applied_behind(self, event: p.AppliedBehind) -> None:
        held = self.held.get(event.shard)
        if held is not None and event.shard not in self.bound and event.step == held.version + 1:
            held.scratch[event.step] = event.digest
            self._verify(event.shard, event.step)

    def _verify(self, shard: int, step: int) -> None:
        held = self.held[shard]
        if step not in held.scratch or step not in held.expected:
            return
        if held.scratch.pop(step) != held.expected.pop(step):
            self._fail(
                "DivergedError",
                f"the state of shard {shard} after step {step} differs between its primary and its backup {self.me}: "
                "one of the two devices computes wrongly; restart from a durable checkpoint without them",
            )
            return
        held.version = step
        held.kept.pop(step, None)
        self._do(p.Swap(step=step, shard=shard))
        if self.now[shard].primary == self.me:
            self._bind(shard)
        self._acknowledge([shard])

    def _bind(self, shard: int) -> None:
        self.bound.add(shard)
        self._have_parameters(shard)
        self._do(p.Bind(step=self.held[shard].version, shard=shard))

    # ----------------------------------------------------------------------------------------------------- rebalancing

    def _plan_copies(self) -> None:
        """What is still to be copied towards the target, shard by shard."""
        self._copies = [
            (shard, member)
            for shard in self._mine()
            for member in self.goal[shard].all
            if member not in {*self.now[shard].all, *self._followers[shard]}
        ]

    def _rebalance(self) -> None:
        """Copy shards towards the target, a bounded number of bytes per step: the vote waits for what is on its way."""
        if not self._copies or not self._may_copy():
            return
        later: list[tuple[int, str]] = []
        for shard, member in self._copies:
            spent = self._copied_bytes >= self.copy_budget_bytes
            if spent or self.held[shard].version != self.committed:
                later.append((shard, member))
                continue
            self._copied_bytes += self.shape.sizes[shard]
            self._copying[shard, member] = self.committed
            self._send(member, Copy(step=self.committed, shard=shard))
        self._copies = later

    def _may_copy(self) -> bool:
        """A copy is read before the state moves on, so a vote waits for it: copies are made while runs are computed."""
        attempt = self.attempt
        computing = self.begun == attempt.step and bool(attempt.pending or not attempt.targets)
        return computing and not self.recovering and not self._digesting and not attempt.voted

    def _on_took_copy(self, event: p.TookCopy) -> None:
        if self.recovering or event.step != self.committed:
            return
        held = self._held(event.shard)
        held.version = event.step
        held.kept.clear()
        held.scratch.clear()
        held.expected.clear()
        self._send(event.source, Copied(step=event.step, shard=event.shard, intact=event.intact))

    def _on_copied(self, source: str, message: Copied) -> None:
        if self._copying.pop((message.shard, source), None) is None:
            return
        if not message.intact:
            self._fail("DivergedError", f"the copy of shard {message.shard} arrived at {source} with other content")
            return
        self._followers[message.shard].add(source)
        if message.shard in self.attempt.finished:
            self._forward_gradients([message.shard], only=source)

    # -------------------------------------------------------------------------------------------------------- recovery

    def _on_report(self, source: str, report: Report) -> None:
        self._reports[source] = report

    def _may_decide(self) -> bool:
        """Reports of all members of the view: a missing one means the next view, never a guess."""
        return self.recovering and self.view is not None and set(self._reports) >= set(self.view.ids)

    def _recover(self) -> None:
        if not self._may_decide():
            return
        assert self.view is not None
        if self._finishing is not None and self._may_leave_without_state():
            self._over = True
            self._do(p.Leave())
            return
        decision = decide(self.view, self._reports, self.shape)
        if isinstance(decision, Lost):
            self._fail("StateLostError", decision.reason)
            return
        self._complete(decision)
        self._resume(decision)

    def unreported(self) -> tuple[str, ...]:
        """Members of the view whose report has not come."""
        if not self.recovering or self.view is None:
            return ()
        return tuple(m for m in self.view.ids if m not in self._reports)

    def _may_leave_without_state(self) -> bool:
        """At the end of the job only parameters count: members that left in peace took their shards along."""
        return all(r.finishing and set(r.parameters) == {r.committed} for r in self._reports.values())

    def _complete(self, decision: Recovery) -> None:
        """Bring apply and publish of the highest committed step to their end, again where need be."""
        if self.committed < decision.committed:
            if self.base is not None and decision.record is not None:
                self._pass(decision.record)
            else:
                self._arrive(decision)
        assert self.view is not None
        self.base, self.now = decision.base, decision.now
        self.goal = target(self.now, self.shape.sizes, self.view.nodes, self.shape.backups)
        self._plan_copies()
        for shard in sorted(set(self.held)):
            if self.me not in self.now[shard].all:
                self._drop(shard)
        for shard in self._mine():
            self._take_over(shard, decision)
        self._publish_lacking(decision)
        self._compute_unverified(decision)

    def _arrive(self, decision: Recovery) -> None:
        self.record, self.committed = decision.record, decision.committed
        self._missing = None
        self.attempt = self._new_attempt(decision.committed + 1)

    def _take_over(self, shard: int, decision: Recovery) -> None:
        """Make the state of the highest committed step in the model's own memory, as the shard's primary."""
        if self.committed < 0 or (shard in self.bound and self.held[shard].version == self.committed):
            return
        held = self.held[shard]
        if held.version == self.committed:
            self._bind(shard)
        else:
            assert decision.record is not None
            touched = {shard: held.kept[self.committed].touched}
            self._do(p.Apply(record=decision.record, shards=(shard,), touched=touched))
            self._applied(shard)

    def _publish_lacking(self, decision: Recovery) -> None:
        assert self.view is not None
        if self.committed < 0:
            if self.me == self.view.ids[0]:
                self.parameters = [-1] * len(self.parameters)
                self._missing = None
                self._publish(dict(decision.lacking), None)
            return
        mine = set(self._mine())
        wanted = {m: tuple(s for s in lacking if s in mine) for m, lacking in decision.lacking.items()}
        self._publish(wanted, decision.record)

    def _compute_unverified(self, decision: Recovery) -> None:
        mine = self._mine()
        if self.committed >= 0:
            unverified = frozenset().union(*decision.unverified.values())
            self._compute_digests([s for s in mine if s in unverified], self.now)

    def _resume(self, decision: Recovery) -> None:
        """Survivors' partials stay valid; only what nobody has is computed again."""
        assert self.view is not None
        attempt = self.attempt
        attempt.hand(decision.runs[self.me])
        mine = set(self._mine())
        for key in [key for key in attempt.folds if key[0] not in mine]:
            del attempt.folds[key]
        for shard in mine:
            kept = self.held[shard].kept.get(attempt.step) if shard in self.held else None
            if kept is not None and shard not in attempt.finished:
                attempt.finished[shard] = kept
        self.recovering = False
        self._newcomers = decision.newcomers if decision.donor == self.me else ()
        self._do(p.Resumed(view=self.view, recovery=decision))
        for block, node in sorted(attempt.sent):
            self._deliver(block, node, dict(decision.folded))
        self._forward_gradients([s for s in sorted(mine) if s in attempt.finished])
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self._on_run_done(event)
        self._deliver_unsent()
        self._say_done()
        self._replay_later()

    # ---------------------------------------------------------------------------------------- the training loop's side

    def _progress(self) -> None:
        """Whatever has become possible, in an order that cannot matter for the result."""
        before = -1
        while not self._over and before != len(self._out):
            before = len(self._out)
            self._recover()
            self._create()
            self._pay_loop_state()
            self._finish_folds()
            self._vote()
            self._commit()
            self._rebalance()
            self._enter()
            self._feed()
            self._leave()

    def _create(self) -> None:
        """The job starts: every holder makes the initial state of its shards, once the parameters are here."""
        if self.recovering or self.committed >= 0 or not self._parameters_are_here():
            return
        fresh = tuple(s for s, h in enumerate(self.now) if self.me in h.all and self._held(s).version == NEVER)
        if fresh:
            bound = tuple(s for s in fresh if self.now[s].primary == self.me)
            self.bound.update(bound)
            for shard in fresh:
                self._held(shard).version = -1
            self._do(p.Create(shards=fresh, bound=bound))
            self._acknowledge(fresh)

    def _pay_loop_state(self) -> None:
        if self._newcomers and not self.recovering and self.begun == self.committed + 1:
            assert self._loop_state is not None
            for member in self._newcomers:
                self._send(member, LoopState(step=self.begun, state=self._loop_state[1]))
            self._newcomers = ()

    def _enter(self) -> None:
        if self.entered or self.recovering or not self._parameters_are_here():
            return
        step = self.committed + 1
        if step == 0 or (self._loop_state is not None and self._loop_state[0] == step):
            self.entered = True
            state = self._loop_state[1] if self._loop_state else None
            self._do(p.Enter(step=step, state=state))

    def _feed(self) -> None:
        """Give the training loop its next run, or let it leave the step. It goes on computing during a recovery."""
        if not self._ready or not self._parameters_are_here():
            return
        if self.record is not None and self.begun == self.committed:
            self._ready = False
            self._do(p.Advance(record=self.record))
            return
        todo = [r for r in self.attempt.pending if not self.recovering or r in self._allowed]
        if self.begun == self.attempt.step and todo:
            self._ready = False
            self.attempt.running = todo[0]
            self._do(p.Compute(step=self.attempt.step, run=todo[0]))

    def _say_done(self) -> None:
        if self._finishing is not None and not self.recovering:
            self._done.add(self.me)
            for member in self._others:
                self._send(member, Done(step=self._finishing))

    def _leave(self) -> None:
        if self._finishing is not None and self.view is not None and self._done >= set(self.view.ids):
            self._over = True
            self._do(p.Leave())
