"""The key that says how a job ended, for nodes that were cut off when its last node took the job's keys along.

Outside the prefix of the job's life, so that nothing under it is left; the store forgets it by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from elastrain.codec import decoder_of
from elastrain.launcher.notices import Over
from elastrain.launcher.store import Store
from elastrain.launcher.values import Roster

ENDED_TTL_S = 600.0
"""So long it can be read."""
_decode_roster = decoder_of(Roster)


def ended_key(life: str) -> str:
    return f"/elastrain/.ended/{life}"


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
