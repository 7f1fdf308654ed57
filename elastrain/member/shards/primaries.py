"""Answer for a shard as its primary: update it in the model's own memory, and take over from a primary that is lost."""

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
    """Binds states to the model's memory; which shards are meant is in `Roles.mine`."""

    def __init__(self, commit: Commit, holdings: Holdings, comparison: Comparison, out: Commands) -> None:
        self._commit = commit
        self._holdings = holdings
        self._comparison = comparison
        self._out = out
        self._unlooked: dict[int, set[str]] = {}
        """Shard that was taken over -> who gets its parameters once this member knows that its state is right."""

    def forget_view(self) -> None:
        """Who lacks which parameters is decided anew in the next view."""
        for members in self._unlooked.values():
            members.clear()

    def create(self, me: str) -> list[int]:
        """Make the initial state of this member's shards where it has none; the shards that it was made for."""
        holders = enumerate(self._commit.roles.live)
        # By all holders alike: a backup's initial state is as good as its primary's, and nothing has to be sent.
        fresh = [s for s, h in holders if me in h.all and self._holdings.of(s).version == NEVER]
        if fresh:
            bound = tuple(shard for shard in fresh if self._commit.roles.is_mine(shard))
            self._holdings.bound.update(bound)
            for shard in fresh:
                self._holdings[shard].version = self._commit.step
            self._out.do(p.Create(shards=tuple(fresh), bound=bound))
        return fresh

    def apply(self, record: Record, touched: Mapping[int, Touched]) -> None:
        """Update this member's shards for the step that has just been committed."""
        if touched:
            self._out.do(p.Apply(record=record, shards=tuple(touched), touched=dict(touched)))
        # Noted at once, carried out by the driver before the next event: in between nobody asks.
        for shard in touched:
            self._applied(shard)
            self._commit.parameters.have(shard)

    def take_over(self, shard: int, record: Record | None) -> None:
        """Make the state of the highest committed step, of which this is the record, in the model's own memory."""
        held, step = self._holdings.of(shard), self._commit.step
        # It is created when the initial parameters are here; or it was found wrong since it was reported, and given up.
        if held.version == NEVER:
            return
        # Verified as of the committed step: nothing has to be computed, only the model's memory be taken over.
        if held.version == step:
            if shard not in self._holdings.bound:
                self.bind(shard)
            elif shard not in self._unlooked:
                self._commit.parameters.have(shard)
            return
        # Verified as of the step before, with the gradient kept: recovery names only those who can do this.
        assert record is not None
        touched = {shard: held.kept[step].touched}
        # Made again from what was verified, and looked at: of two states that differ nobody could tell the right one
        # afterwards, and what a copy is made of it would bear it out.
        self._out.do(p.UpdateAgain(record=record, shard=shard, touched=touched[shard]))
        self._comparison.replace(shard, p.Apply(record=record, shards=(shard,), touched=touched))
        self._applied(shard)
        self._look(shard)

    def bind(self, shard: int) -> None:
        """Let the verified state work on the model's own memory."""
        self._holdings.bound.add(shard)
        self._look(shard)
        self._comparison.replace(shard, p.Bind(step=self._holdings[shard].version, shard=shard))

    def _look(self, shard: int) -> None:
        """Before this member publishes or votes as its new primary: are state and gradients as they were?"""
        for step in sorted(self._holdings[shard].kept):
            self._out.do(p.CheckGradient(step=step, shard=shard))
        self._comparison.look_at_own(shard)
        self._unlooked.setdefault(shard, set())

    def hold_back(self, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Of these parameters, by member, those that may be published now; the others go out with `looked`."""
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
            # What was found wrong was given up: the view that was asked for has others publish it.
            if self._holdings.has(shard, self._commit.step) and self._commit.roles.is_mine(shard):
                self._commit.parameters.have(shard)
                for member in members:
                    found[member].append(shard)
        return dict(sorted(found.items()))

    def _applied(self, shard: int) -> None:
        held = self._holdings[shard]
        # As primary nobody verifies its state any more: an open question about it would stay open.
        if held.difference is not None:
            self._holdings.end_in_doubt(held.difference)
        held.apply(self._commit.step)
        self._holdings.bound.add(shard)
