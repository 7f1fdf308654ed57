"""Tell backups what this primary's states are worth, and everybody what was published: digests, made behind."""

from __future__ import annotations

from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.member.commands import Commands
from elastrain.member.commit import Commit
from elastrain.member.comparison import Comparison
from elastrain.member.holdings import Holdings
from elastrain.member.repair import Repair
from elastrain.member.views import Views
from elastrain.messages import Digests
from elastrain.placement import Placement
from elastrain.witness import changed_since


class Announcements:
    """Owns whether digests are being made."""

    def __init__(
        self, views: Views, commit: Commit, holdings: Holdings, comparison: Comparison, repair: Repair, out: Commands
    ) -> None:
        self.is_digesting = False
        """The states must stay as they are until their digests are taken: no vote meanwhile."""
        self._views, self._commit, self._holdings = views, commit, holdings
        self._comparison, self._repair, self._out = comparison, repair, out
        self._has_announced_initial = False
        """Whether the digests of the parameters that the job starts with were asked for in this view."""

    def forget_view(self) -> None:
        self._has_announced_initial = False

    def announce_initial(self) -> None:
        """Tell, once per view, what this member's part is worth of what the job starts with."""
        if not self._has_announced_initial:
            self._has_announced_initial = True
            # A backup notes what its own are worth: nothing is compared with them before the first update.
            roles, held = self._commit.roles, tuple(self._holdings)
            self.announce(held, roles.mine, roles.live)

    def announce(self, states: Iterable[int], published: Iterable[int], before: Placement) -> None:
        """Digest these states, and what was published of these shards.

        `before`: the holders until now. Those whose role has just ended still compare what they have.
        """
        wanted = tuple(shard for shard in states if self._is_compared(shard, before))
        told = tuple(published) if self._views.others else ()
        # Where nobody compares, digests would be work for nothing: a job of one makes none.
        if wanted or told:
            self.is_digesting = True
            self._out.do(p.ComputeDigests(step=self._commit.step, shards=wanted, published=told))
        else:
            self._holdings.drop_leaving()

    def _is_compared(self, shard: int, before: Placement) -> bool:
        """Whether another member compares its copy of this shard with ours."""
        # Also with holders whose role has just ended, and with followers: they have made the same update.
        roles = self._commit.roles
        holders = {*before[shard].all, *roles.live[shard].all, *roles.readers(shard)}
        return not holders.isdisjoint(self._views.others)

    def _has_changed(self, event: p.StatesDigested) -> bool:
        """Whether something is not what was told of it before: then it is not told again, but given up."""
        # Told anew in every view: what has changed meanwhile would be taken for right by all who compare with it.
        for shard in sorted({*event.digests, *event.published}):
            held = self._holdings.find(shard)
            if held is None or held.version != event.step:
                continue
            state, published = event.digests.get(shard, held.digest), event.published.get(shard, held.published)
            if held.digest not in (None, state) or held.published not in (None, published):
                self._repair.give_up(shard, changed_since(shard=shard, step=event.step, member=self._views.me))
            # Remembered: a copy that is given later carries the digest that others have compared.
            held.digest, held.published = state, published
        return self._repair.is_due

    def on_digested(self, event: p.StatesDigested) -> None:
        self.is_digesting = False
        # A view came in between, or another step: its own announcement tells what counts then.
        if event.step != self._commit.step or self._views.is_recovering:
            return
        if self._has_changed(event):
            return
        self._comparison.tell_own(event.published)
        is_told = self._commit.roles.is_mine if self._commit.is_initial else lambda _: True
        message = Digests(
            step=event.step,
            digests=tuple(sorted((shard, digest) for shard, digest in event.digests.items() if is_told(shard))),
            parameters=tuple(sorted(event.published.items())),
        )
        self._out.send_all(self._views.others, message)
        self._holdings.drop_leaving()
