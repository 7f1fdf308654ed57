"""Execution of the work commands on a member's buffers.

It decides nothing, sends nothing and waits for nothing. Slots, tensors and states come from the port and are opaque.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastrain import protocol as p
from elastrain.buffers.background import BackgroundWork
from elastrain.buffers.captures import Boundaries, Captures
from elastrain.buffers.copy_pieces import CopyPieces
from elastrain.buffers.folds import Folds
from elastrain.buffers.port import Arithmetic, CaptureSink, FetchSink, NoSink, StateStore, Tensor
from elastrain.buffers.shard_states import EVER, StateBooks
from elastrain.buffers.slots import Buffers, GradientSlots
from elastrain.protocol.evaluation_messages import BatchBoundary
from elastrain.protocol.messages import (
    Boundary,
    FetchedShard,
    Gradient,
    Message,
    Partial,
    Publish,
    RepeatUpdate,
    ShardCopy,
)
from elastrain.protocol.move_messages import ShadowPiece


class BufferBook:
    """The buffers of a member, and the execution of work commands.

    `runs` and `lanes` (number per shard) are the job's.
    """

    def __init__(
        self,
        *,
        runs: int,
        lanes: Sequence[int],
        arithmetic: Arithmetic,
        states: StateStore[int],
        scratch: StateStore[tuple[int, int]],
    ) -> None:
        self._arithmetic = arithmetic
        self._buffers: Buffers[Tensor] = Buffers(arithmetic.new_buffer, arithmetic.kind)
        self.slots = GradientSlots(arithmetic)
        self.boundaries = Boundaries()
        self._folds = Folds(runs, lanes, arithmetic, self._buffers)
        self._states = StateBooks(arithmetic, self._buffers, states, scratch)
        self._pieces = CopyPieces(arithmetic, states)
        self._behind = BackgroundWork(arithmetic, self._states)
        self._captures = Captures(states, NoSink())
        self._fetched: FetchSink | None = None
        self._kept_slots: int | None = None
        """Number of slots to keep, until the end of an attempt has left no more. None: all are kept."""

    def capture_into(self, sink: CaptureSink) -> None:
        """Send states that are captured for a checkpoint to this sink."""
        self._captures = Captures(self._states.states, sink)

    def fetch_into(self, sink: FetchSink) -> None:
        """Give states that the training loop asks for to this sink."""
        self._fetched = sink

    def trim(self, slots: int) -> None:
        """Free the memory of buffers that are not in use, and of free gradient slots beyond a number of slots.

        What is in use now is freed at the end of an attempt.
        """
        self._kept_slots = slots
        self._arithmetic.hold(None, self._buffers.take_free())
        self.slots.keep(slots)

    def _trim_rest(self) -> None:
        # Sums of the attempt have come back, and the next step has taken no slot yet.
        if self._kept_slots is not None:
            self._arithmetic.hold(None, self._buffers.take_free())
            self._kept_slots = None if self.slots.keep(self._kept_slots) else self._kept_slots

    @property
    def has_work_behind(self) -> bool:
        """True if background work is queued."""
        return bool(self._behind.tasks) or self._captures.has_work

    def work_behind(self) -> list[p.Event]:
        """Do some background work, for a few milliseconds at most. Returns its results."""
        # Votes wait for digests and updates. Only the next update of a state waits for its copy.
        if self._behind.tasks:
            return self._behind.work()
        self._captures.work()
        return []

    def kept_gradients(self) -> Iterable[Tensor]:
        """Return the gradients that this member keeps as a backup until its updates are verified."""
        return self._states.all_kept()

    def is_settled(self, shard: int) -> bool:
        """Return True if a backup's state stays as it is until the next finished gradient comes."""
        return self._states.is_settled(shard)

    def carry_out(self, command: p.Command) -> p.Event | None:
        """Do the work of one command. Commands of other classes are ignored."""
        match command:
            case p.CombineOwn():
                self.slots.combine(command)
            case p.Keep():
                return self._folds.keep(command, *self._incoming(command))
            case p.CombineShard():
                return self._folds.combine(command)
            case p.FinishGradients():
                return self._folds.finish(command)
            case p.StoreGradients():
                return self._states.store_gradients(command)
            case p.ApplyBehind() | p.ComputeDigests() | p.DigestParameters():
                self._behind.add(command)
            case p.DigestAgain():
                return self._digest_again(command)
            case p.TakeParameters() | p.ShowParameters() | p.HoldBlocks():
                self._change_model(command)
            case p.CheckGradient() | p.CheckPartial():
                return self._check(command)
            case p.TakeBoundary() | p.DropBoundaries():
                self.boundaries.change(command)
            case p.VoidAttempt():
                # All results go, also kept gradients: something was wrong, and no member knows how far it has spread.
                self.boundaries.end_step(command.step)
                self._folds.end_step()
                self.slots.void_step()
                self._states.void_step(command.step)
                self._pieces.end_step()
            case p.EndAttempt():
                self.boundaries.end_step(command.step)
                self._folds.end_step()
                self.slots.end_step(command.step)
                self._pieces.end_step()
                self._trim_rest()
            case _:
                return self._change_states(command)
        return None

    def _check(self, command: p.CheckGradient | p.CheckPartial) -> p.Event | None:
        if isinstance(command, p.CheckGradient):
            is_intact = self._states.is_kept_intact(command.shard, command.step)
            return None if is_intact else p.GradientsKept(step=command.step, damaged=(command.shard,))
        # Only its maker still has what was sent, so it can tell damage in memory from damage on the way.
        is_intact = self.slots.is_intact((command.step, command.block, command.node))
        return p.PartialChecked(step=command.step, block=command.block, is_intact=is_intact)

    def _change_model(self, command: p.TakeParameters | p.ShowParameters | p.HoldBlocks) -> None:
        match command:
            case p.HoldBlocks():
                self._arithmetic.hold(command.blocks, self._buffers.take_free() if command.for_good else None)
            case p.ShowParameters():
                for shard in command.shards:
                    # As if they had been published: they lie there already.
                    self._arithmetic.take_parameters(shard, self._arithmetic.parameters(shard))
            case p.TakeParameters():
                self._arithmetic.take_parameters(command.shard, command.payload[command.index], command.part)

    def _change_states(self, command: p.Command) -> p.Event | None:
        """Carry out a command that changes states. Queued background updates that it makes obsolete are removed."""
        self._settle(command)
        match command:
            case p.Create():
                self._states.create(command)
            case p.Unbind():
                self._states.unbind(command.shard)
            case p.TakeOwnUpdate():
                self._states.update_behind(command.updates, shows=True)
            case p.UpdateAgain():
                return self._states.update_again(command)
            case p.TryUpdate():
                return self._states.try_update(command)
            case p.Apply():
                step = command.record.step
                # With the finished gradients, before the end of the attempt frees them.
                self._states.apply(command, {shard: self._folds.finished(step, shard) for shard in command.shards})
                for shard in command.shards:
                    self._behind.forget(shard, step)
            case p.Swap():
                self._states.swap(command)
                self._behind.forget(command.shard, command.step)
            case p.Bind():
                self._states.bind(command)
                self._behind.forget(command.shard, command.step)
            case p.TakeFetched():
                return self._fetch(command)
            case p.TakeCopy() if self._pieces.take(command):
                self._behind.forget(command.shard, EVER)
                return self._states.take_copy(command, self._pieces.whole(command.shard))
            # A digest of the freed state would be taken for that of the shard's next state.
            case p.Drop():
                self._states.drop(command.shard)
                self._arithmetic.hold(None, self._buffers.take_free())
                self._behind.forget(command.shard, EVER)
        return None

    def _settle(self, command: p.Command) -> None:
        """Copy states that a checkpoint still needs, before the command changes them."""
        match command:
            case p.Apply():
                for shard in command.shards:
                    self._captures.settle(shard)
            case p.Bind() | p.Unbind() | p.TakeCopy() | p.Drop():
                self._captures.settle(command.shard)
            case p.Swap():
                self._captures.give_away(command.shard)
            case p.Capture():
                self._captures.capture(command)
            case p.DropCaptures():
                self._captures.drop(command.step)

    def _incoming(self, command: p.Keep) -> tuple[Tensor, int | None]:
        """Return a partial, and its maker's checksum of it, if it is needed."""
        # A partial of this member's own was never sent: it still lies where the training loop added it up.
        if command.payload is None:
            at = (command.step, command.block, command.node)
            # The gradient over all runs is used as it is: no addition follows before which it would be checked.
            is_compared = not self._folds.is_whole(command.shard, command.node)
            checksum = self.slots.checksum(at, command.shard, command.lane) if is_compared else None
            return self.slots.lane(at, command.shard, command.lane), checksum
        packed, *tensors = command.payload
        return tensors[command.index], self._arithmetic.unpack_checksums(packed)[command.index]

    def _digest_again(self, command: p.DigestAgain) -> p.Event:
        shard = command.shard
        # The present content and not a reported digest: only so a change in memory can be found.
        if command.parameters:
            found = self._arithmetic.digest_published(shard, None)
        else:
            found = self._arithmetic.digest(self._states.states[shard])
        return p.DigestedAgain(
            step=command.step, shard=shard, parameters=command.parameters, asker=command.asker, digest=found
        )

    def _fetch(self, command: p.TakeFetched) -> p.Event:
        if command.payload is None:
            state, told = self._states.states[command.shard], command.digest
        else:
            state, told = self._arithmetic.unpack(command.payload, in_place=True)
            told = told if command.digest is None else command.digest

        # It is asked after the copy: the sender uses its memory again if this member was stopped and taken for lost.
        def is_intact() -> bool:
            return told in (None, self._arithmetic.digest(state))

        sink = self._fetched
        intact = sink is not None and state.shard == command.shard and sink.gather(state, is_intact)
        return p.TookFetched(step=command.step, shard=command.shard, intact=intact, source=command.source)

    def payload(self, message: Message) -> list[Tensor]:
        """Return the tensors sent with a message, in the order in which it names them. Checksums come before sums."""
        match message:
            case Partial():
                at = (message.step, message.block, message.node)
                checksums = [self.slots.checksum(at, shard, lane) for shard, lane in message.lanes]
                lanes = [self.slots.lane(at, shard, lane) for shard, lane in message.lanes]
                return [self._arithmetic.pack_checksums(checksums), *lanes]
            case Gradient():
                sent = [self._gradient(message.step, shard) for shard in message.shards]
                packed = self._arithmetic.pack_checksums([checksum for _, checksum in sent])
                return [packed, *(tensor for tensor, _ in sent)]
            case Publish():
                return [self._arithmetic.parameters(shard) for shard in message.shards]
            case ShadowPiece():
                return [self._arithmetic.parameters(message.shard, message.part)]
            case RepeatUpdate():
                # Gradient and former state: the receiver has to make the update from this member's inputs.
                kept = self._states.kept(message.step, message.shard)
                packed = self._arithmetic.pack_checksums([self._states.kept_checksum(message.step, message.shard)])
                return [packed, kept, *self._arithmetic.pack(self._states.states[message.shard])]
            case Boundary():
                return list(self.boundaries[message.name].tensors)
            case BatchBoundary():
                return list(self.boundaries[message.at].tensors)
            case ShardCopy():
                return self._pieces.of(message.shard, message.part)
            case FetchedShard():  # the receiver compares with the digest of the message
                return self._arithmetic.pack(self._states.states[message.shard], message.digest)
        return []

    def _gradient(self, step: int, shard: int) -> tuple[Tensor, int]:
        # Backups ask for it in a recovery too: this primary may have applied it by then.
        finished = self._folds.finished(step, shard)
        if finished is None:
            # It was applied already, and is kept for a backup that has not used it yet.
            return self._states.kept(step, shard), self._states.kept_checksum(step, shard)
        return finished, self._folds.checksum(step, shard)
