"""The books of one member: which slot holds which partial, what is folded, finished, kept, in scratch and left behind.

Carries out the work that the protocol commands, over a port that does the arithmetic: with tensors in a worker
(`runtime/arithmetic.py`), with symbols in the simulator. Called by one thread only. Decides nothing, sends nothing,
waits for nothing; slots, tensors and states are whatever the port gives out, and are never looked into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.arithmetic import Arithmetic, GradientSlot, State, StateStore, Tensor
from elastrain.fold import Node, is_covered, overlap
from elastrain.lending import Buffers
from elastrain.messages import Gradient, Message, Partial, Publish, ShardCopy

BEHIND_BYTES = 4 << 20
"""State that is updated in one go behind the scenes: it keeps the engine from its messages for that long."""
EVER = 1 << 62
"""Later than any step."""


@dataclass(eq=False)
class UsedSlot:
    """A gradient slot, the blocks whose partial it holds, and whether the training loop accumulates into it."""

    slot: GradientSlot
    # By block: the partials of one slot are added and let go of block by block, as backward passes them.
    blocks: set[int] = field(default_factory=set)
    running: bool = True


class Ledger:
    """`runs` and `lanes` (their number, per shard) are the logical job's."""

    def __init__(
        self,
        *,
        runs: int,
        lanes: Sequence[int],
        arithmetic: Arithmetic,
        states: StateStore[int],
        scratch: StateStore[tuple[int, int]],
    ) -> None:
        self.behind: deque[p.ApplyBehind | p.ComputeDigests | p.DigestParameters] = deque()
        self._digested: dict[int, int] = {}
        """Shard -> digest of its parameters, while those of all are taken."""
        self._root: Node = (0, runs)
        self._lanes = lanes
        self._arithmetic = arithmetic
        self._buffers: Buffers[Tensor] = Buffers(arithmetic.new_buffer, arithmetic.kind)
        self._free_slots: list[GradientSlot] = []
        self._running: UsedSlot | None = None
        self._own: dict[tuple[int, int], dict[Node, UsedSlot]] = {}
        """(step, block) -> this member's partials."""
        self._ended = -1
        """Newest step whose attempt has ended: what is computed for it from then on serves nobody."""
        self._folds: dict[tuple[int, int], dict[Node, Tensor]] = {}
        """(shard, lane) -> what this primary has."""
        self._finished: dict[tuple[int, int], Tensor] = {}
        """(step, shard) -> gradient over all runs."""
        self._kept: dict[tuple[int, int], Tensor] = {}
        """(shard, step) -> the same at a backup, until its update is verified."""
        self._states = states
        self._scratch = scratch
        """(shard, step) -> what a backup has made of its state, until it is verified."""

    # ----------------------------------------------------------------------------------------- the training loop's side

    def start_run(self) -> GradientSlot:
        """A slot for the next run; the training loop zeroes it and accumulates into it."""
        slot = self._free_slots.pop() if self._free_slots else self._arithmetic.new_slot()
        self._running = UsedSlot(slot)
        return slot

    def block_done(self, event: p.BlockDone) -> None:
        """The block's part of the run is a partial of this member, unless it has it already or the step has ended."""
        assert self._running is not None
        node, mine = (event.run, event.run + 1), self._own.setdefault((event.step, event.block), {})
        if event.step > self._ended and not is_covered(node, mine):
            mine[node] = self._running
            self._running.blocks.add(event.block)

    def change_slot(self) -> GradientSlot:
        """Another slot for the run being computed: what it has reported stays where it is, the rest is void."""
        before = self._running
        assert before is not None
        slot = self.start_run()
        self._stop(before)
        return slot

    def end_run(self) -> None:
        if self._running is not None:
            self._stop(self._running)
            self._running = None

    def _stop(self, slot: UsedSlot) -> None:
        slot.running = False
        self._recycle(slot)

    def _recycle(self, slot: UsedSlot) -> None:
        """A slot is free when it holds no partial and nobody computes into it: then, and once."""
        if not slot.blocks and not slot.running:
            assert all(slot.slot is not free for free in self._free_slots), "a gradient slot is free twice"
            self._free_slots.append(slot.slot)

    def free_buffers(self) -> Iterable[Tensor]:
        """Those whose content nobody needs."""
        return self._buffers.free()

    # ------------------------------------------------------------------------------------------------------ commands

    def carry_out(self, command: p.Command) -> p.Event | None:
        """Do the work of one command. Commands that are no work of this class are ignored."""
        match command:
            case p.CombineOwn():
                self._combine_own(command)
            case p.Keep():
                self._enter_fold((command.shard, command.lane), command.node, self._incoming(command))
            case p.CombineShard():
                self._combine_shard(command)
            case p.FinishGradients():
                norms = {shard: self._finish(command, shard) for shard in command.shards}
                return p.GradientsFinished(step=command.step, square_norms=norms)
            case p.StoreGradient():
                self._store_gradient(command)
            case p.Create():
                for shard in command.shards:
                    self._states[shard] = self._arithmetic.create(shard, bound=shard in command.bound)
            case p.Apply():
                self._apply(command)
            case p.ApplyBehind() | p.ComputeDigests():
                self.behind.append(command)
            case p.DigestParameters():
                self._digested = {}
                self.behind = deque(task for task in self.behind if not isinstance(task, p.DigestParameters))
                self.behind.append(command)
            case p.UpdateAgain():
                return self._update_again(command)
            case p.DigestAgain():
                return self._digest_again(command)
            case p.TakeParameters():
                self._arithmetic.copy(command.payload[command.index], self._arithmetic.parameters(command.shard))
            case p.TakeCopy():
                return self._take_copy(command)
            case p.EndAttempt():
                self._end_attempt(command.step)
            case _:
                self._move_state(command)
        return None

    def _move_state(self, command: p.Command) -> None:
        match command:
            case p.Swap():
                self._states.adopt(command.shard, self._scratch, (command.shard, command.step))
                self._let_go(command.shard, command.step)
            case p.Bind():
                self._bind(self._states[command.shard])
                self._let_go(command.shard, command.step)
            case p.Unbind():
                self._unbind(command.shard)
            case p.Drop():
                if command.shard in self._states:
                    del self._states[command.shard]
                self._let_go(command.shard, EVER)

    def work_behind(self) -> list[p.Event]:
        """Some work that nobody waits for at once, a few milliseconds at most; nothing when there is none."""
        if not self.behind:
            return []
        task = self.behind.popleft()
        if isinstance(task, p.ComputeDigests):
            return [self._compute_digests(task)]
        if isinstance(task, p.DigestParameters):
            return self._digest_parameters(task)
        tasks = [task, *self._more_like(task)]
        scratch = [self._states.copy(t.shard) for t in tasks]
        step = task.record.step
        items = [(s, self._kept[t.shard, step], t.touched) for s, t in zip(scratch, tasks, strict=True)]
        self._arithmetic.update(items, task.record)
        for state in scratch:
            self._scratch[state.shard, step] = state
        digests = {state.shard: self._arithmetic.digest(state) for state in scratch}
        return [p.AppliedBehind(step=step, shard=shard, digest=digest) for shard, digest in digests.items()]

    def _more_like(self, task: p.ApplyBehind) -> list[p.ApplyBehind]:
        """The next updates of the same step: one call of the optimizer serves several shards."""
        found: list[p.ApplyBehind] = []
        size_bytes = self._states.size_bytes(task.shard)
        while self.behind and size_bytes < BEHIND_BYTES:
            following = self.behind[0]
            if not isinstance(following, p.ApplyBehind) or following.record is not task.record:
                break
            self.behind.popleft()
            found.append(following)
            size_bytes += self._states.size_bytes(following.shard)
        return found

    # --------------------------------------------------------------------------------------------------- comparisons

    def _compute_digests(self, task: p.ComputeDigests) -> p.StatesDigested:
        digests: dict[int, int] = {}
        published: dict[int, int] = {}
        for shard in dict.fromkeys((*task.shards, *task.published)):
            needed = shard in task.shards or self._arithmetic.has_master(shard)
            state = self._states[shard] if needed and shard in self._states else None
            if state is not None and shard in task.shards:
                digests[shard] = self._arithmetic.digest(state)
            if shard in task.published:
                published[shard] = self._arithmetic.digest_published(shard, state)
        return p.StatesDigested(step=task.step, digests=digests, published=published)

    def _digest_parameters(self, task: p.DigestParameters) -> list[p.Event]:
        """Some of them, and the rest in later turns."""
        size_bytes = 0
        # The engine's thread does this: messages must not wait until a whole model has been digested.
        for shard in range(len(self._digested), len(self._lanes)):
            self._digested[shard] = self._arithmetic.digest_parameters(shard)
            size_bytes += self._arithmetic.parameters_bytes(shard)
            if size_bytes >= BEHIND_BYTES:
                break
        if len(self._digested) < len(self._lanes):
            self.behind.append(task)
            return []
        return [p.ParametersDigested(turn=task.turn, digests=self._digested)]

    def _update_again(self, command: p.UpdateAgain) -> p.Event:
        step, shard = command.record.step, command.shard
        state = self._states.copy(shard)
        before = self._arithmetic.digest(state)
        self._arithmetic.update([(state, self._kept[shard, step], command.touched)], command.record)
        self._scratch[shard, step] = state
        return p.UpdatedAgain(step=step, shard=shard, before=before, digest=self._arithmetic.digest(state))

    def _digest_again(self, command: p.DigestAgain) -> p.Event:
        shard = command.shard
        if command.parameters:
            found = self._arithmetic.digest_parameters(shard)
        else:
            found = self._arithmetic.digest(self._states[shard])
        return p.DigestedAgain(
            step=command.step, shard=shard, parameters=command.parameters, asker=command.asker, digest=found
        )

    # ----------------------------------------------------------------------------------------------------------- folds

    def _combine_own(self, command: p.CombineOwn) -> None:
        mine, c = self._own[command.step, command.block], command.combine
        left, right = mine.pop(c.left), mine.pop(c.right)
        self._arithmetic.add_block(left.slot, right.slot, command.block)
        mine[c.parent] = left
        right.blocks.discard(command.block)
        self._recycle(right)

    def _own_lane(self, step: int, block: int, node: Node, shard: int, lane: int) -> Tensor:
        return self._arithmetic.lane(self._own[step, block][node].slot, shard, lane)

    def _incoming(self, command: p.Keep) -> Tensor:
        if command.payload is None:
            return self._own_lane(command.step, command.block, command.node, command.shard, command.lane)
        tensor: Tensor = command.payload[command.index]
        if command.node != self._root or self._lanes[command.shard] > 1:
            return tensor
        # The whole gradient as it is, without an addition that would move it here. It is read once more after the
        # commit, and by then its owner may have got the parameters from a new primary and be in its next run.
        mine = self._buffers.take(tensor)
        self._arithmetic.copy(tensor, mine)
        return mine

    def _combine_shard(self, command: p.CombineShard) -> None:
        key, c = (command.shard, command.lane), command.combine
        left, right = self._folds[key].pop(c.left), self._folds[key].pop(c.right)
        self._enter_fold(key, c.parent, self._sum(command.shard, left, right))

    def _enter_fold(self, key: tuple[int, int], node: Node, tensor: Tensor) -> None:
        """In the place of everything that it has in common runs with: a covered partial must not be found again."""
        partials = self._folds.setdefault(key, {})
        for other in [other for other in partials if overlap(other, node)]:
            self._buffers.give_back(partials.pop(other))
        partials[node] = tensor

    def _sum(self, shard: int, left: Tensor, right: Tensor) -> Tensor:
        """`left + right` in a buffer of ours; what belongs to a member's partial is never written."""
        # A partial may be read by several primaries, in shared memory, and is sent again if a primary is lost.
        if self._buffers.owns(left):
            out = left
        else:
            out = right if self._buffers.owns(right) else self._buffers.take(left)
        self._arithmetic.add(shard, left, right, out)
        if out is not right:
            self._buffers.give_back(right)
        return out

    def _finish(self, command: p.FinishGradients, shard: int) -> float:
        """The sum over all runs of each lane, and nothing less, added in block order."""
        total, *more = (self._folds[shard, lane].pop(self._root) for lane in range(self._lanes[shard]))
        for tensor in more:
            total = self._sum(shard, total, tensor)
        self._finished[command.step, shard] = total
        return self._arithmetic.square_norm(shard, total)

    def _store_gradient(self, command: p.StoreGradient) -> None:
        source: Tensor = command.payload[command.index]
        # It may come twice, from a primary before a change of view and from its successor after it: the same bits.
        kept = self._kept.get((command.shard, command.step))
        if kept is None:
            kept = self._kept[command.shard, command.step] = self._buffers.take(source)
        self._arithmetic.copy(source, kept)

    def _gradient_of(self, step: int, shard: int) -> Tensor:
        finished = self._finished.get((step, shard))
        return finished if finished is not None else self._kept[shard, step]

    def _end_attempt(self, step: int) -> None:
        for partials in self._folds.values():
            self._give_back(partials.values())
        self._give_back(self._finished.values())
        self._folds.clear()
        self._finished.clear()
        slots = dict.fromkeys(slot for mine in self._own.values() for slot in mine.values())
        self._own.clear()
        # The training loop may still be computing for this step: what it reports from now on is not taken in.
        self._ended = step
        for slot in slots:
            slot.blocks.clear()
            self._recycle(slot)

    def _give_back(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._buffers.give_back(tensor)

    # ---------------------------------------------------------------------------------------------------------- states

    def _apply(self, command: p.Apply) -> None:
        """Together what is in memory, then one after another what has to be read for it."""
        outside = [(shard,) for shard in command.shards if shard in self._states.outside]
        inside = tuple(shard for shard in command.shards if shard not in self._states.outside)
        for shards in (inside, *outside):
            self._apply_together(command, shards)

    def _apply_together(self, command: p.Apply, shards: tuple[int, ...]) -> None:
        step = command.record.step
        # A backup that has become primary may have made the update in scratch already: it is not made twice.
        fresh = {s: self._states[s] for s in shards if (s, step) not in self._scratch}
        items = [(state, self._gradient_of(step, s), command.touched[s]) for s, state in fresh.items()]
        self._arithmetic.update(items, command.record)
        for shard in shards:
            self._bind(fresh[shard] if shard in fresh else self._scratch.pop((shard, step)))
            self._let_go(shard, step)

    def _bind(self, state: State) -> None:
        """The state, changed or not, is put back."""
        self._arithmetic.bind(state)
        self._states[state.shard] = state

    def _unbind(self, shard: int) -> None:
        state = self._states[shard]
        if self._arithmetic.unbind(state):
            self._states[shard] = state

    def _let_go(self, shard: int, step: int) -> None:
        """Nothing that belongs to this shard's steps up to `step` is needed any more."""
        self.behind = deque(
            t for t in self.behind if not (isinstance(t, p.ApplyBehind) and t.shard == shard and t.record.step <= step)
        )
        for key in [key for key in self._kept if key[0] == shard and key[1] <= step]:
            self._buffers.give_back(self._kept.pop(key))
        for key in [key for key in self._scratch if key[0] == shard and key[1] <= step]:
            del self._scratch[key]

    def _take_copy(self, command: p.TakeCopy) -> p.Event:
        # The digest that travels with the tensors says what left the sender; the message's, what that had verified.
        state, told = self._arithmetic.unpack(command.payload)
        told = told if command.digest is None else command.digest
        self._let_go(command.shard, EVER)
        self._states[command.shard] = state
        intact = self._arithmetic.digest(state) == told and state.shard == command.shard
        return p.TookCopy(step=command.step, shard=command.shard, intact=intact, source=command.source, told=told)

    # -------------------------------------------------------------------------------------------------------- payloads

    def payload(self, message: Message) -> list[Tensor]:
        """The tensors that travel with a message, in the order in which it names them."""
        match message:
            case Partial():
                at = (message.step, message.block, message.node)
                return [self._own_lane(*at, shard, lane) for shard, lane in message.lanes]
            case Gradient():
                return [self._gradient_of(message.step, shard) for shard in message.shards]
            case Publish():
                return [self._arithmetic.parameters(shard) for shard in message.shards]
            case ShardCopy():
                return self._arithmetic.pack(self._states[message.shard])
        return []
