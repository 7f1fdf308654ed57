"""States of shards, the gradients and scratch that backups keep until an update is verified, and the updates."""

from __future__ import annotations

from collections.abc import Sequence

from elastrain import protocol as p
from elastrain.buffers.port import Arithmetic, State, StateStore, Tensor
from elastrain.buffers.slots import Buffers

EVER = 1 << 62
"""A number larger than any step."""


class StateBooks:
    """Owner of the shard states, their scratch, and the gradients that a backup keeps."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        buffers: Buffers[Tensor],
        states: StateStore[int],
        scratch: StateStore[tuple[int, int]],
    ) -> None:
        self.states = states
        self._arithmetic = arithmetic
        self._buffers = buffers
        self._scratch = scratch
        """(shard, step) -> a backup's updated state, until it is verified."""
        self._kept: dict[tuple[int, int], Tensor] = {}
        """(shard, step) -> finished gradient at a backup, until its update is verified."""
        self._checksums: dict[tuple[int, int], int] = {}
        """(shard, step) -> the primary's checksum of that gradient."""

    def store_gradients(self, command: p.StoreGradients) -> p.GradientsKept:
        """Copy finished gradients, and check the copies. Damaged ones are reported and do not count as kept."""
        packed, *tensors = command.payload
        step, checksums = command.step, self._arithmetic.unpack_checksums(packed)
        for shard, source, checksum in zip(command.shards, tensors, checksums, strict=True):
            # It may come twice, from a primary before a change of view and from its successor after it: the same bits.
            kept = self._kept.get((shard, step))
            if kept is None:
                kept = self._arithmetic.new_kept(source)
                kept = self._kept[shard, step] = self._buffers.take(source) if kept is None else kept
            self._arithmetic.copy(source, kept)
            self._checksums[shard, step] = checksum
        damaged = tuple(shard for shard in command.shards if not self.is_kept_intact(shard, step))
        intact = tuple(shard for shard in command.shards if shard not in damaged)
        return p.GradientsKept(step=step, shards=intact, damaged=damaged, source=command.source)

    def is_kept_intact(self, shard: int, step: int) -> bool:
        """Return True if the kept gradient is still what its primary had."""
        return self._arithmetic.checksum(self._kept[shard, step]) == self._checksums[shard, step]

    def kept_checksum(self, step: int, shard: int) -> int:
        """Return the primary's checksum of a kept gradient."""
        return self._checksums[shard, step]

    def is_settled(self, shard: int) -> bool:
        """Return True if no kept gradient will change the shard's state. Safe from any thread."""
        # Over a copy of the keys: the engine may add one while another thread looks.
        return all(at != shard for at, _ in list(self._kept))

    def all_kept(self) -> list[Tensor]:
        """Return the kept gradients, without copies, those of the newest step first."""
        return [self._kept[key] for key in sorted(self._kept, key=lambda key: -key[1])]

    def kept(self, step: int, shard: int) -> Tensor:
        """Return a kept gradient."""
        return self._kept[shard, step]

    def create(self, command: p.Create) -> None:
        """Make the initial states of these shards."""
        self.states.bound.update(command.bound)
        for shard in command.shards:
            self.states[shard] = self._arithmetic.create(shard, bound=shard in command.bound)

    def apply(self, command: p.Apply, gradients: dict[int, Tensor | None]) -> None:
        """Update all resident states in one call, then each spilled state by itself.

        gradients: shard -> finished gradient of this primary. None: the shard was taken over from a lost primary, and
            the kept
        gradient is used.
        """
        for shards in self._together(command.shards):
            self._apply_together(command, shards, gradients)

    def _together(self, shards: Sequence[int]) -> list[tuple[int, ...]]:
        """Divide shards into those in memory and, one after another, those outside, so that one of them is there."""
        outside = [(shard,) for shard in shards if shard in self.states.outside]
        return [tuple(shard for shard in shards if shard not in self.states.outside), *outside]

    def _apply_together(self, command: p.Apply, shards: tuple[int, ...], gradients: dict[int, Tensor | None]) -> None:
        step = command.record.step
        # A backup that became primary may have made the update in scratch already: it is not made twice.
        fresh = {s: self.states[s] for s in shards if (s, step) not in self._scratch}
        items = [
            (state, self._kept[s, step] if gradients[s] is None else gradients[s], command.touched[s])
            for s, state in fresh.items()
        ]
        self._arithmetic.update(items, command.record)
        for shard in shards:
            self._bind(fresh[shard] if shard in fresh else self._scratch[shard, step])
            self.let_go(shard, step)

    def bind(self, command: p.Bind) -> None:
        """Move a verified state to the model's memory, as its primary."""
        self._bind(self.states[command.shard])
        self.let_go(command.shard, command.step)

    def _bind(self, state: State) -> None:
        """Copy the state's parameters into the model, and store the state again, since it may have changed."""
        is_new = state.shard not in self.states.bound
        self.states.bound.add(state.shard)
        self._arithmetic.bind(state, is_new=is_new)
        self.states[state.shard] = state

    def unbind(self, shard: int) -> None:
        """Move a state out of the model's memory."""
        # A state in memory of its own stays as it is, and need not be written to a drive again.
        state, was_outside = self.states[shard], shard in self.states.outside
        self.states.bound.discard(shard)
        if self._arithmetic.unbind(state) or was_outside != (shard in self.states.outside):
            self.states[shard] = state

    def update_behind(self, tasks: Sequence[p.ApplyBehind], *, shows: bool = False) -> list[p.Event]:
        """Make the updates of one step in scratch. `shows`: copy their parameters into the model, and digest later."""
        by_shard = {task.shard: task for task in tasks}
        together = [[by_shard[shard] for shard in shards] for shards in self._together(tuple(by_shard)) if shards]
        return [event for some in together for event in self._update_behind(some, shows=shows)]

    def _update_behind(self, tasks: Sequence[p.ApplyBehind], *, shows: bool) -> list[p.Event]:
        record, step = tasks[0].record, tasks[0].record.step
        fresh = [task for task in tasks if (task.shard, step) not in self._scratch]
        # Beside the state, because the update is made again from the old state if the digests differ.
        scratch = [self.states.copy(task.shard) for task in fresh]
        items = [(s, self._kept[t.shard, step], t.touched) for s, t in zip(scratch, fresh, strict=True)]
        if items:
            self._arithmetic.update(items, record)
        for state in scratch:
            self._scratch[state.shard, step] = state
        if shows:
            for task in tasks:
                self._arithmetic.show(self._scratch[task.shard, step])
            return []
        digests = {task.shard: self._arithmetic.digest(self._scratch[task.shard, step]) for task in tasks}
        return [p.AppliedBehind(step=step, shard=shard, digest=digest) for shard, digest in digests.items()]

    def update_again(self, command: p.UpdateAgain) -> p.Event:
        """Make a backup's update again from its state, into scratch. Returns digests of before and after."""
        # From the state, which is still that of the step before: the scratch is what is in doubt.
        step, shard = command.record.step, command.shard
        state = self.states.copy(shard)
        before, is_intact = self._arithmetic.digest(state), self.is_kept_intact(shard, step)
        self._arithmetic.update([(state, self._kept[shard, step], command.touched)], command.record)
        self._scratch[shard, step] = state
        now = self._arithmetic.digest(state)
        return p.UpdatedAgain(step=step, shard=shard, before=before, has_gradient=is_intact, digest=now)

    def try_update(self, command: p.TryUpdate) -> p.Event:
        """Make a backup's update from the state and gradient that it sent. Nothing of it is kept."""
        packed, gradient, *packed_state = command.payload
        state, _ = self._arithmetic.unpack(packed_state)
        before, has_gradient = self._arithmetic.digest(state), self._arithmetic.checksum(gradient)
        (told,) = self._arithmetic.unpack_checksums(packed)
        self._arithmetic.update([(state, gradient, command.touched)], command.record)
        return p.UpdateTried(
            step=command.record.step,
            shard=command.shard,
            before=before,
            has_gradient=has_gradient == told,
            digest=self._arithmetic.digest(state),
            asker=command.asker,
        )

    def swap(self, command: p.Swap) -> None:
        """Replace the state by its verified scratch."""
        self.states.adopt(command.shard, self._scratch, (command.shard, command.step))
        self.let_go(command.shard, command.step)

    def take_copy(self, command: p.TakeCopy, packed: tuple[State, int]) -> p.Event:
        """Store a received copy, and compare its digest. `packed`: its state, and the digest that came with it."""
        # The digest in the payload is of what left the sender; the message's is of what the sender had verified.
        state, told = packed
        told = told if command.digest is None else command.digest
        # Kept gradients and scratch belong to another state than this one.
        self.let_go(command.shard, EVER)
        self.states.bound.discard(command.shard)
        self.states[command.shard] = state
        intact = self._arithmetic.digest(state) == told and state.shard == command.shard
        return p.TookCopy(step=command.step, shard=command.shard, intact=intact, source=command.source, told=told)

    def drop(self, shard: int) -> None:
        """Free a shard's state, scratch and kept gradients."""
        if shard in self.states:
            del self.states[shard]
        self.states.bound.discard(shard)
        self.let_go(shard, EVER)

    def void_step(self, step: int) -> None:
        """Free the finished gradients of this step, which do not count."""
        for key in [key for key in self._kept if key[1] == step]:
            self._let_gradient_go(key)

    def _let_gradient_go(self, key: tuple[int, int]) -> None:
        self._buffers.give_back(self._kept.pop(key))
        del self._checksums[key]

    def let_go(self, shard: int, step: int) -> None:
        """Free kept gradients and scratch of this shard, up to `step`."""
        for key in [key for key in self._kept if key[0] == shard and key[1] <= step]:
            self._let_gradient_go(key)
        for key in [key for key in self._scratch if key[0] == shard and key[1] <= step]:
            del self._scratch[key]
