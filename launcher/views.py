"""A job's keys in the store: the spec and the view, encoded, and changed by guarded transactions only.

    /elastrain/<job>/spec    immutable: what every member must have in common
    /elastrain/<job>/view    the newest view

Encoding and transactions; whether a view is wanted or allowed is decided before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastrain.launcher.store import Store
from elastrain.world import Member, View


class JobKeys:
    """One agent's access to its job's keys."""

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._prefix = f"/elastrain/{job}/"
        self._view_revision = 0

    def put_view(self, view: View) -> View:
        """Put the view if nobody was faster. Returns the newest view that the store holds: this one, or the other's."""
        key = self._prefix + "view"
        revision = self._store.commit(expect={key: self._view_revision}, put={key: encode_view(view)})
        if revision is not None:
            self._view_revision = revision
            return view
        newest = self._store.get(key)
        if newest is None:
            raise RuntimeError(f"{key} was deleted while the job runs: nobody may do that")
        self._view_revision = newest.revision
        return decode_view(newest.value)

    def put_spec(self, spec: Mapping[str, Any]) -> None:
        """Put the spec if there is none yet."""
        key = self._prefix + "spec"
        self._store.commit(expect={key: 0}, put={key: json.dumps(spec, sort_keys=True).encode()})


def encode_view(view: View) -> bytes:
    members = [{"id": m.id, "node": m.node, "address": m.address} for m in view.members]
    return json.dumps({"generation": view.generation, "members": members, "reason": view.reason}).encode()


def decode_view(value: bytes) -> View:
    raw = json.loads(value)
    members = tuple(Member(id=m["id"], node=m["node"], address=m["address"]) for m in raw["members"])
    return View(generation=raw["generation"], members=members, reason=raw["reason"])
