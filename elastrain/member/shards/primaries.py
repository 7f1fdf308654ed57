"""Work of a primary: update a shard in the model's own memory, and take over from a lost primary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from elastrain import protocol as p
from elastrain.job.values import Record
from elastrain.member.contract import MemberPart
from elastrain.member.integrity.comparison import Comparison
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import NEVER, Commit
from elastrain.member.state.holdings import Holdings

Touched = tuple[int, ...]
"""Per lane of a shard, the bit mask of leaves that got a gradient."""


class Primaries(MemberPart):
    """Part that binds states to the model's memory. `Roles.mine` names the shards."""

    def __init__(self, commit: Commit, holdings: Holdings, comparison: Comparison, out: Commands) -> None:
        self._commit = commit
        self._holdings = holdings
        self._comparison = comparison
        self._out = out
        self._unlooked: dict[int, set[str]] = {}
        """Shard that was taken over -> members that get its parameters once its state is verified here."""

    def forget_view(self) -> None:
        """Forget the members that wait for parameters: the next view decides that anew."""
        for members in self._unlooked.values():
            members.clear()

    def create(self, me: str) -> list[int]:
        """Create missing initial states of this member's shards. Returns the shards that were created."""
        holders = enumerate(self._commit.roles.live)
        # All holders create the same state, so nothing has to be sent.
        fresh = [s for s, h in holders if me in h.all and self._holdings.of(s).version == NEVER]
        if fresh:
            bound = tuple(shard for shard in fresh if self._commit.roles.is_mine(shard))
            self._holdings.bind(bound)
            for shard in fresh:
                self._holdings[shard].create(self._commit.step)
            self._out.do(p.Create(shards=tuple(fresh), bound=bound))
        return fresh

    def apply(self, record: Record, touched: Mapping[int, Touched]) -> None:
        """Update this member's shards for the step that has just been committed."""
        if touched:
            self._out.do(p.Apply(record=record, shards=tuple(touched), touched=dict(touched)))
        # This is noted at once. The driver carries it out before the next event.
        for shard in touched:
            self._applied(shard)
            self._commit.parameters.have(shard)

    def take_over(self, shard: int, record: Record | None) -> None:
        """Make the state after the committed step in the model's own memory. `record`: that step's record."""
        held, step = self._holdings.of(shard), self._commit.step
        # The state is created with the initial parameters, or it was found wrong after the report and given up.
        if held.version == NEVER:
            return
        # The state is verified as of the committed step. Only the model's memory has to be taken over.
        if held.version == step:
            if shard not in self._holdings.bound:
                self.bind(shard)
            elif shard not in self._unlooked:
                self._commit.parameters.have(shard)
            return
        # The state is verified as of the step before, and the gradient is kept: recovery names only such members.
        assert record is not None
        touched = {shard: held.kept[step].touched}
        # The update is made again from verified data, and its digest is taken. There is no second copy to compare with
        # later, and copies of a wrong state would agree with it.
        self._out.do(p.UpdateAgain(record=record, shard=shard, touched=touched[shard]))
        self._comparison.replace(shard, p.Apply(record=record, shards=(shard,), touched=touched))
        self._applied(shard)
        self._look(shard)

    def bind(self, shard: int) -> None:
        """Bind the verified state to the model's own memory."""
        self._holdings.bind([shard])
        self._look(shard)
        self._comparison.replace(shard, p.Bind(step=self._holdings[shard].version, shard=shard))

    def _look(self, shard: int) -> None:
        """Check state and gradients before this new primary publishes or votes."""
        for step in sorted(self._holdings[shard].kept):
            self._out.do(p.CheckGradient(step=step, shard=shard))
        self._comparison.look_at_own(shard)
        self._unlooked.setdefault(shard, set())

    def hold_back(self, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Return member -> shards that may be published now. The others are returned later, by `looked`."""
        for member, shards in wanted.items():
            for shard in self._unlooked.keys() & set(shards):
                self._unlooked[shard].add(member)
        return {m: [shard for shard in shards if shard not in self._unlooked] for m, shards in wanted.items()}

    def looked(self) -> dict[str, list[int]] | None:
        """Return member -> shards to publish now, because this primary has verified them. None: nothing has changed."""
        looked = [shard for shard in sorted(self._unlooked) if not self._comparison.is_looking_at(shard)]
        if not looked:
            return None
        found: dict[str, list[int]] = defaultdict(list)
        for shard in looked:
            members = self._unlooked.pop(shard)
            # A wrong state was given up. In the next view another member publishes the shard.
            if self._holdings.has(shard, self._commit.step) and self._commit.roles.is_mine(shard):
                self._commit.parameters.have(shard)
                for member in members:
                    found[member].append(shard)
        return dict(sorted(found.items()))

    def _applied(self, shard: int) -> None:
        held = self._holdings[shard]
        # A primary's state is not verified, so an open doubt would stay open.
        if held.difference is not None:
            self._holdings.end_in_doubt(held.difference)
        held.apply(self._commit.step)
        self._holdings.bind([shard])
