"""Tombstones: whether a job's keys may be removed at its end, and the key that then says how it ended.

Nodes that were cut off read that key. It lies outside of the prefix of the job's life, and its lease ends by itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from elastrain.job.world import View
from elastrain.launcher.shared.job_values import Roster
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.store.port import Store
from elastrain.protocol.codec import decoder_of

ENDED_TTL_S = 600.0
"""Time to live of a tombstone, in seconds."""
_decode_roster, _decode_view = decoder_of(Roster), decoder_of(View)


def ended_key(life: str) -> str:
    """Return the key of the tombstone of a life."""
    return f"/elastrain/.ended/{life}"


def may_come_back(values: Mapping[str, bytes], answering: Collection[int]) -> bool:
    """Return True if a node without a key, which has not said that it leaves, may come back and need the job's keys.

    A node that answers has lost its lease in an outage, and a node of the job may only be asleep. After the job's end
    all nodes leave. values: name within the keys of the life -> value. answering: incarnations.
    """
    if "end" in values:
        return False
    return not incarnations("left", values) | incarnations("gone", values) >= _nodes(values) | set(answering)


def _nodes(values: Mapping[str, bytes]) -> set[int]:
    """Return the incarnations of the nodes in the newest view, or, before the first view, in the roster."""
    if "view" in values:
        return {member.incarnation for member in _decode_view(values["view"]).members}
    return {node.incarnation for node in _decode_roster(values["roster"]).nodes} if "roster" in values else set()


def incarnations(kind: str, names: Iterable[str]) -> frozenset[int]:
    """Return the incarnations of the nodes that left a key of this kind (`left` or `gone`)."""
    return frozenset(int(name.removeprefix(f"{kind}/")) for name in names if name.startswith(f"{kind}/"))


def epitaph(life: str, values: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tombstone to put when a life's keys are removed, from their last values.

    Empty if its end is not known.
    """
    if "end" not in values or "roster" not in values:
        return {}
    # The roster identifies the job, because a later one may have the same name.
    told = {"end": json.loads(values["end"]), "roster": values["roster"].decode()}
    return {ended_key(life): json.dumps(told).encode()}


def read_ended(store: Store, life: str, roster: Roster | None) -> Over | None:
    """Return how the life with this roster ended. None if it goes on, or if its end is not known."""
    there = store.get(ended_key(life))
    if there is None or roster is None:
        return None
    told = json.loads(there.value)
    return Over(**told["end"]) if _decode_roster(told["roster"].encode()) == roster else None
