"""A member asks others for states in few goes, and takes its own ones while they answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastrain import protocol as p
from elastrain.member.shards.state_fetch import AHEAD_BYTES, StateFetch
from elastrain.member.state.ballot import Commands
from elastrain.protocol.messages import FetchedShard

SHARDS, MINE = range(12), (3, 7)
SIZE = AHEAD_BYTES // 4


class Holdings:
    """States of the committed step that this member has."""

    def has(self, shard: int, step: int) -> bool:
        return step == 5 and shard in MINE

    def __getitem__(self, shard: int) -> Any:
        return SimpleNamespace(digest=100 + shard)


def fetch(out: Commands) -> StateFetch:
    live = {shard: SimpleNamespace(primary="me" if shard in MINE else "other") for shard in SHARDS}
    views: Any = SimpleNamespace(me="me", is_recovering=False)
    commit: Any = SimpleNamespace(step=5, roles=SimpleNamespace(live=live))
    holdings: Any = Holdings()
    return StateFetch([SIZE] * len(SHARDS), views, commit, holdings, out)


def done(own: StateFetch, out: Commands) -> list[object]:
    """Let it go on. Returns what it does: shards that it asks for, and "own" for each that it takes of its own."""
    found: list[object] = []
    while (commands := out.take()) or own.progress():
        for command in commands:
            match command:
                case p.SendMessage():
                    found.append(vars(command.message)["shard"])
                case p.TakeFetched(source=source):
                    found += ["own"] * (source == "me")
                    own.on_taken(p.TookFetched(step=5, shard=command.shard, intact=True, source=source))
                case p.StateFetched():
                    found.append("all")
    return found


def test_questions_go_together_and_own_states_are_taken_meanwhile() -> None:
    own = fetch(out := Commands())
    own.on_wanted()
    assert done(own, out) == [0, 1, 2, 4, "own", "own"]

    def answer(shard: int) -> list[object]:
        own.on_answer("other", FetchedShard(step=5, shard=shard, digest=None), [])
        return done(own, out)

    assert answer(0) == []
    assert answer(1) == [5, 6]
    assert [answer(shard) for shard in (2, 4)] == [[], [8, 9]]
    assert [answer(shard) for shard in (5, 6, 8, 9)] == [[], [10, 11], [], []]
    assert [answer(shard) for shard in (10, 11)] == [[], ["all"]]
