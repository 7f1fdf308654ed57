"""What becomes of a job's keys at its end: whether its last node takes them along, and the key that then says how it
ended, for nodes that were cut off.

That key is outside the prefix of the job's life, so that nothing under it is left; the store forgets it by itself.
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
"""So long it can be read."""
_decode_roster, _decode_view = decoder_of(Roster), decoder_of(View)


def ended_key(life: str) -> str:
    return f"/elastrain/.ended/{life}"


def may_come_back(values: Mapping[str, bytes], answering: Collection[int]) -> bool:
    """Whether a node that has no key, and has not said that it goes, may come back and need those of the job.

    One that answers has lost its lease in an outage; one that belongs to the job may only sleep. At the job's end all
    go.

    values: name within the keys of the life -> value. answering: incarnations.
    """
    if "end" in values:
        return False
    return not incarnations("left", values) | incarnations("gone", values) >= _nodes(values) | set(answering)


def _nodes(values: Mapping[str, bytes]) -> set[int]:
    """The incarnations of the nodes of the newest view; before the first one, of those that begin the job."""
    if "view" in values:
        return {member.incarnation for member in _decode_view(values["view"]).members}
    return {node.incarnation for node in _decode_roster(values["roster"]).nodes} if "roster" in values else set()


def incarnations(kind: str, names: Iterable[str]) -> frozenset[int]:
    """Of nodes that have gone: `kind` says how."""
    return frozenset(int(name.removeprefix(f"{kind}/")) for name in names if name.startswith(f"{kind}/"))


def epitaph(life: str, values: Mapping[str, bytes]) -> dict[str, bytes]:
    """What is put when the keys of a life go, whose last names and values these are; empty where none said its end."""
    if "end" not in values or "roster" not in values:
        return {}
    # With its roster: a later job may have the same name.
    told = {"end": json.loads(values["end"]), "roster": values["roster"].decode()}
    return {ended_key(life): json.dumps(told).encode()}


def read_ended(store: Store, life: str, roster: Roster | None) -> Over | None:
    """How the life with this roster ended; None while it goes on, or where that is not known (any more)."""
    there = store.get(ended_key(life))
    if there is None or roster is None:
        return None
    told = json.loads(there.value)
    return Over(**told["end"]) if _decode_roster(told["roster"].encode()) == roster else None
