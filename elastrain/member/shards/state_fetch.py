"""Fetch of the whole optimizer state by one member, between two of its steps: for `optimizer.state_dict()`.

No other member waits. The open step cannot be committed before this member's loop asks for work, so the states of the
committed step stay as they are until the last one is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastrain import protocol as p
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import FetchedShard, FetchShard

AHEAD_BYTES = 32 << 20
"""Bytes of parameters whose states are under way at a time. Their memory is small beside that of the whole state."""
TRIES = 3
"""Number of tries to fetch a shard that arrives damaged. Then this member ends."""


class StateFetch(MemberPart):
    """Part that owns the shards that this member still has to fetch, and the questions that it has to answer."""

    def __init__(self, sizes: Sequence[int], views: Views, commit: Commit, holdings: Holdings, out: Commands) -> None:
        self._sizes, self._views, self._commit = sizes, views, commit
        self._holdings, self._out = holdings, out
        self._step: int | None = None
        """The step whose states are fetched, or None."""
        self._missing: dict[int, int] = {}
        """Shard that is not here yet -> number of times that it arrived damaged."""
        self._asked: set[int] = set()
        """Missing shards that are on their way."""
        self._questions: list[tuple[str, FetchShard]] = []
        """(member, question) that this holder has not answered."""

    def forget_view(self) -> None:
        """Forget questions and answers under way. `progress` asks the holders of the new view."""
        self._asked.clear()
        self._questions.clear()

    @handles(p.StateWanted)
    def on_wanted(self) -> None:
        """Begin to fetch the states of the committed step."""
        self._step = self._commit.step
        self._missing = dict.fromkeys(range(len(self._sizes)), 0)
        self._asked.clear()

    @handles(FetchShard)
    def on_question(self, source: str, message: FetchShard) -> None:
        """Note the question. `progress` answers it once the state is here."""
        self._questions.append((source, message))

    @handles(FetchedShard)
    def on_answer(self, source: str, message: FetchedShard, payload: object) -> None:
        """Take a state that was asked for."""
        if message.step == self._step and message.shard in self._asked:
            self._take(message.shard, source, message.digest, payload)

    @handles(p.TookFetched)
    def on_taken(self, event: p.TookFetched) -> None:
        """Note that a state is here. A damaged one is asked for again, and ends this member after `TRIES` tries."""
        if event.step != self._step or event.shard not in self._missing:
            return
        self._asked.discard(event.shard)
        if event.intact:
            del self._missing[event.shard]
            return
        self._missing[event.shard] += 1
        what = f"the state of shard {event.shard} from {event.source} arrived damaged"
        if self._missing[event.shard] == TRIES:
            self._out.fail("DivergedError", f"{what} {TRIES} times: test the memory of both machines")
        else:
            self._out.do(p.Noticed(reason=f"{what}: once more"))

    def progress(self) -> bool:
        """Answer questions, ask for missing shards, or tell the loop that all are here. Returns True if it did."""
        if self._views.is_recovering:
            return False
        return self._answer() or self._ask() or self._finish()

    def _answer(self) -> bool:
        due = [(source, asked) for source, asked in self._questions if self._holdings.has(asked.shard, asked.step)]
        self._questions = [question for question in self._questions if question not in due]
        for source, asked in due:
            digest = self._holdings[asked.shard].digest
            self._out.send(source, FetchedShard(step=asked.step, shard=asked.shard, digest=digest))
        return bool(due)

    def _ask(self) -> bool:
        """Ask for what there is room for, and take this member's own states, while the other members answer."""
        under_way_bytes = sum(self._sizes[shard] for shard in self._asked)
        # Questions go together, because a holder works on something else between two of them.
        has_room = under_way_bytes <= AHEAD_BYTES // 2
        waiting = [shard for shard in self._missing if shard not in self._asked]
        is_any = False
        for shard in sorted(waiting, key=self._is_here):
            if self._is_here(shard):
                is_any = self._start(shard) or is_any
            elif has_room and (not under_way_bytes or under_way_bytes + self._sizes[shard] <= AHEAD_BYTES):
                under_way_bytes += self._sizes[shard] if (is_asked := self._start(shard)) else 0
                is_any = is_asked or is_any
        return is_any

    def _is_here(self, shard: int) -> bool:
        return self._step is not None and self._holdings.has(shard, self._step)

    def _start(self, shard: int) -> bool:
        """Take this member's own verified state, or ask the primary. Returns False if neither is possible yet."""
        assert self._step is not None
        primary = self._commit.roles.live[shard].primary
        if self._is_here(shard):
            self._asked.add(shard)
            self._take(shard, self._views.me, self._holdings[shard].digest, None)
        elif primary != self._views.me:
            self._asked.add(shard)
            self._out.send(primary, FetchShard(step=self._step, shard=shard))
        return shard in self._asked

    def _take(self, shard: int, source: str, digest: int | None, payload: object) -> None:
        assert self._step is not None
        self._out.do(p.TakeFetched(step=self._step, shard=shard, payload=payload, source=source, digest=digest))

    def _finish(self) -> bool:
        if self._step is None or self._missing:
            return False
        self._out.do(p.StateFetched(step=self._step))
        self._step = None
        return True
