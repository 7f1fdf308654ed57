"""Background work: updates of backups and digests, in pieces of a few milliseconds."""

from __future__ import annotations

from collections import deque

from elastrain import protocol as p
from elastrain.buffers.port import Arithmetic
from elastrain.buffers.shard_states import StateBooks

BEHIND_BYTES = 4 << 20
"""Bytes of state updated in one go in the background. The engine handles no messages meanwhile."""
Task = p.ApplyBehind | p.ComputeDigests | p.DigestParameters


class BackgroundWork:
    """The queue of background tasks."""

    def __init__(self, arithmetic: Arithmetic, books: StateBooks) -> None:
        self.tasks: deque[Task] = deque()
        self._arithmetic = arithmetic
        self._books = books
        self._digested: dict[int, int] = {}
        """Shard -> digest of its parameters, collected until all requested ones are there."""

    def add(self, task: Task) -> None:
        """Queue a task. A new `DigestParameters` replaces an older one."""
        if isinstance(task, p.DigestParameters):
            # The parameters have changed since an earlier task of this kind was ordered, so its digests are void.
            self._digested = {}
            self.tasks = deque(each for each in self.tasks if not isinstance(each, p.DigestParameters))
        self.tasks.append(task)

    def forget(self, shard: int, step: int) -> None:
        """Remove queued updates of this shard up to `step`, which were made elsewhere or are not wanted."""
        self.tasks = deque(
            t for t in self.tasks if not (isinstance(t, p.ApplyBehind) and t.shard == shard and t.record.step <= step)
        )

    def work(self) -> list[p.Event]:
        """Work for a few milliseconds at most. Returns the results, or an empty list if there is no task."""
        if not self.tasks:
            return []
        task = self.tasks.popleft()
        if isinstance(task, p.ComputeDigests):
            return [self._compute_digests(task)]
        if isinstance(task, p.DigestParameters):
            return self._digest_parameters(task)
        return self._books.update_behind([task, *self._more_like(task)])

    def _more_like(self, task: p.ApplyBehind) -> list[p.ApplyBehind]:
        """Return the next updates of the same step, since one call of the optimizer serves several shards."""
        found: list[p.ApplyBehind] = []
        states = self._books.states
        size_bytes = states.size_bytes(task.shard)
        while self.tasks and size_bytes < BEHIND_BYTES:
            following = self.tasks[0]
            # In order: digests queued in between are of the states before later updates.
            if not isinstance(following, p.ApplyBehind) or following.record is not task.record:
                break
            self.tasks.popleft()
            found.append(following)
            size_bytes += states.size_bytes(following.shard)
        return found

    def _compute_digests(self, task: p.ComputeDigests) -> p.StatesDigested:
        states = self._books.states
        digests: dict[int, int] = {}
        published: dict[int, int] = {}
        for shard in dict.fromkeys((*task.shards, *task.published)):
            # A state on disk is read only if the model's memory is not enough.
            needed = shard in task.shards or self._arithmetic.has_master(shard)
            state = states[shard] if needed and shard in states else None
            if state is not None and shard in task.shards:
                digests[shard] = self._arithmetic.digest(state)
            if shard in task.published:
                published[shard] = self._arithmetic.digest_published(shard, state)
        return p.StatesDigested(step=task.step, digests=digests, published=published)

    def _digest_parameters(self, task: p.DigestParameters) -> list[p.Event]:
        """Digest some of the parameters, and the rest in later turns."""
        size_bytes = 0
        # The engine's thread does this: messages must not wait until a whole model has been digested.
        for shard in task.needed[len(self._digested) :]:
            self._digested[shard] = self._arithmetic.digest_published(shard, None)
            size_bytes += self._arithmetic.parameters_bytes(shard)
            if size_bytes >= BEHIND_BYTES:
                break
        if len(self._digested) < len(task.needed):
            # At the end of the queue, because others wait for the other tasks too.
            self.tasks.append(task)
            return []
        return [p.ParametersDigested(turn=task.turn, digests=self._digested)]
