"""A job's keys in the store (spec, roster, view, counters, nodes): encoding and guarded transactions.

    /elastrain/<job>/nodes/<node>    leased: the node's record of itself
    /elastrain/<job>/job             immutable: the operator's settings on which all nodes must agree
    /elastrain/<job>/roster          immutable: the nodes that began the job; `restored`: the store had lost it
    /elastrain/<job>/spec            immutable: settings that all members must have in common
    /elastrain/<job>/view            the newest view
    /elastrain/<job>/due             the first commit is due and may have been made
    /elastrain/<job>/begun           a step has been committed, so there is state to lose
    /elastrain/<job>/checkpoint      the newest visible durable checkpoint
    /elastrain/<job>/end             how the job ended, until its last node has left
    /elastrain/<job>/left/<start>    the node of this incarnation has left in good order while others go on
    /elastrain/<job>/members         number of member ids in use; /incarnations likewise for starts of nodes
    /elastrain/<job>/lease           the job's own lease, which owns this and all keys above but `nodes`
    /elastrain/.secrets/<job>        a hint for people where the job's secret lies; the only value without a seal
    /elastrain/.lives/<job>          the job's current life; absent in the first one
    /elastrain/.ended/<job>          how it ended, for `ENDED_TTL_S` after its last node has left

A later life (restart of all workers) has its own keys under `<job>~<life>`, so late writes of an older one do no harm.
All agents keep the job's lease alive, for hours: if all are killed, the store removes the keys in the end.
Other parts decide whether a view is wanted. All methods block as the store does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from elastrain.base.environment import job_of, life_of, scope
from elastrain.job.world import View
from elastrain.launcher.shared.job_values import Life, NodeRecord, PutCheckpoint, Roster
from elastrain.launcher.store.life_keys import OutlivedError, as_stored, life_key, read_life
from elastrain.launcher.store.port import Item, LeaseLostError, Store, StoreUnavailableError
from elastrain.launcher.store.sealed import hint_key
from elastrain.launcher.store.tombstones import ENDED_TTL_S, epitaph, incarnations, may_come_back
from elastrain.protocol.codec import remembering

_LOOK_AGAIN_S = 0.1


class JobKeys:
    """One agent's access to its job's keys, for one thread at a time. `job`: the name of one of its lives.

    `ttl_s`: time that the keys outlive the last agent. None: as long as the store exists.
    """

    def __init__(self, store: Store, job: str, ttl_s: float | None = None) -> None:
        self._store = store
        self.prefix = f"/elastrain/{job}/"
        self._lease_key = self.prefix + "lease"
        self.life = job
        self.view_key, self._roster_key = self.prefix + "view", self.prefix + "roster"
        self._hint = hint_key(job)
        self._ttl_s = ttl_s
        self._lease: int | None = None
        self.newest_revision = 0
        """Newest revision of the store in any answer so far. A watch may be behind it."""

    def node(self, name: str) -> str:
        """Return the key of a node."""
        return f"{self.prefix}nodes/{name}"

    def put_next_view(self, view: View, roster: Roster | None = None, seen: set[str] | None = None) -> View | None:
        """Put the view as `put_view`, but return None without the roster: the job is over, or must be put again.

        roster: that of the view's job. None is also returned if the store holds another one.
        """
        upon, stands = self._roster()
        return None if stands is None or stands != (roster or stands) else self.put_view(view, seen, upon=upon)

    def put_view(self, view: View, seen: set[str] | None = None, *, upon: int | None = None) -> View | None:
        """Put the view unless the store holds one as new. Returns the newest view: this one, or another agent's.

        Returns None and puts nothing if the store lacks the preceding view, if the job is over, or if the roster's
        revision is not `upon`. A view without any member of the preceding one is put only if `seen` contains all keys
        that could contradict it: those of its nodes, and that the first commit is due.
        """
        end, due, begun = (self.prefix + key for key in ("end", "due", "begun"))
        while True:
            there, newest = self.newest_view()
            if newest is not None and newest.generation >= view.generation:
                return newest
            # The preceding view is lost, or the last node has removed it. A node that slept must not go on alone.
            if (newest.generation if newest is not None else 0) != view.generation - 1:
                return None
            gone = newest.members if newest is not None and set(newest.ids).isdisjoint(view.ids) else ()
            signs = {due, *(self.node(member.node) for member in gone)} if gone else set()
            absent = [end, *(signs.difference(seen) if seen is not None else ())]
            if any(self._store.get(key) is not None for key in absent):
                return None
            # The proposing agent may not know of the first commit, and new members must not begin the job again.
            has_begun = self._store.get(begun)
            view = view if has_begun is None or view.begun else replace(view, begun=True)
            expect = {self.view_key: there, begun: 0 if has_begun is None else has_begun.revision}
            if upon is not None:  # the last node may have removed all keys after the check above
                expect[self._roster_key] = upon
            if self.commit({**expect, **dict.fromkeys(absent, 0)}, {self.view_key: encode_view(view)}) is not None:
                return view
            if upon is not None and self._roster()[0] != upon:
                return None

    def put_view_again(self, view: View, roster: Roster | None = None) -> View:
        """Put the current view again after the store has lost it. Returns the newest view, as `put_view` does.

        roster: that of the view's job. Nothing is put if the store holds another job's roster.
        """
        while True:
            upon, stands = self._roster()
            if roster is not None and stands is not None and stands != roster:
                return view
            there, newest = self.newest_view()
            if newest is not None and newest.generation >= view.generation:
                return newest
            expect = {self._roster_key: upon, self.view_key: there}
            if self.commit(expect, {self.view_key: encode_view(view)}) is not None:
                return view

    def newest_view(self) -> tuple[int, View | None]:
        """Return the revision of the newest view, and the view, or 0 and None."""
        there = self._get(self.view_key)
        return (0, None) if there is None else (there.revision, decode_view(there.value))

    def _roster(self) -> tuple[int, Roster | None]:
        """Return the revision of the roster, and the roster, or 0 and None."""
        there = self._get(self._roster_key)
        return (0, None) if there is None else (there.revision, decode_roster(there.value))

    def has_roster(self) -> bool:
        """Return True if the store holds a roster."""
        return self._roster()[1] is not None

    def put_spec(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Put the spec if there is none. Returns the one that the store holds."""
        return dict(self.put_once("spec", spec))

    def put_roster(
        self, roster: Roster, used: int = 0, life: Life | None = None, *, seen: Mapping[str, int] | None = None
    ) -> Roster | None:
        """Put the roster if there is none. Returns the one that the store holds. Raises OutlivedError in an older life.

        The member ids of its workers, and all below `used`, are in use from then on. life: put too, in case the store
        has lost it. seen: keys that led to this roster, with revisions. If one has changed, nothing is put and None is
        returned: the store may have lost its data, and with it another roster. A store without data looks like the
        job's first life, so the life's key is checked too.
        """
        there, stands = read_life(self._store, self.life)
        if stands.number > life_of(self.life):
            raise OutlivedError(f"the job is in its life {stands.number}")
        key, members = self._roster_key, self.prefix + "members"
        put = {key: encode_roster(roster), members: str(max(roster.first_member + roster.workers, used)).encode()}
        if life is not None and life.number > stands.number:
            put[life_key(self.life)] = msgspec.json.encode(as_stored(life))
        if self.commit({**(seen or {}), key: 0, life_key(self.life): there}, put) is not None:
            return roster
        _, holds = self._roster()
        return holds if holds is not None or seen else self.put_roster(roster, used, life)

    def put_once(self, name: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the value under the name if there is none. Returns the one that the store holds."""
        key = self.prefix + name
        while True:
            if self.commit({key: 0}, {key: json.dumps(value, sort_keys=True).encode()}) is not None:
                return value
            there = self._get(key)
            if there is not None:
                return self.read(there)

    def put_checkpoint(self, told: PutCheckpoint) -> str:
        """Record a checkpoint as the newest one, if its member is in the newest view.

        Returns the reason if not, else "".
        """
        key = self.prefix + "checkpoint"
        while True:
            revision, view = self.newest_view()
            if view is None or told.member not in view:
                return f"{told.member} is no longer a member of the job"
            there = self._get(key)
            value = {"life": told.life, "step": told.step, "name": told.name, "generation": view.generation}
            # A repetition is right: the member may be lost after the checkpoint is visible, before it has told the
            # others.
            if there is not None and is_older(value, before := self.read(there)):
                return f"the checkpoint of step {before['step']} is newer"
            expect = {self.view_key: revision, key: there.revision if there is not None else 0}
            if self.commit(expect, {key: json.dumps(value, sort_keys=True).encode()}) is not None:
                return ""

    def put_checkpoint_again(self, value: Mapping[str, Any]) -> None:
        """Put the newest checkpoint's record again after the store has lost it, unless the store's record is as new."""
        key = self.prefix + "checkpoint"
        while True:
            there = self._get(key)
            if there is not None and not is_older(self.read(there), value):
                return
            expect = {key: there.revision if there is not None else 0}
            if self.commit(expect, {key: json.dumps(value, sort_keys=True).encode()}) is not None:
                return

    def raise_number(self, counter: str, at_least: int) -> None:
        """Raise a counter to this number of used numbers, if the store has a smaller one."""
        key = self.prefix + counter
        while True:
            there = self._store.get(key)
            if there is not None and int(there.value) >= at_least:
                return
            revision = there.revision if there is not None else 0
            if self.commit({key: revision}, {key: str(at_least).encode()}) is not None:
                return

    def take_number(self, counter: str, *, at_least: int = 0, look: Callable[[], Mapping[str, int]] = dict) -> int:
        """Return the next unused number of a counter, at least `at_least` (the store may have lost the count).

        look: called before each try. Returns keys that must not change, and their revisions.
        """
        key = self.prefix + counter
        while True:
            expect = look()
            there = self._store.get(key)
            number = max(int(there.value) if there is not None else 0, at_least)
            revision = there.revision if there is not None else 0
            if self.commit({**expect, key: revision}, {key: str(number + 1).encode()}) is not None:
                return number

    def take_member(self, *, at_least: int, roster: Roster | None = None) -> int:
        """Return the number of a new member. Raises StoreUnavailableError if another roster or none is there.

        Without the roster the job is over, or its keys must be put again first: a new count would repeat numbers. The
        same holds once the next life has begun.
        """

        def look() -> dict[str, int]:
            there, life = read_life(self._store, self.life)
            upon, stands = self._roster()
            if stands is None or stands != (roster or stands) or life.number > life_of(self.life):
                raise StoreUnavailableError("the job's roster is not in the store")
            return {life_key(self.life): there, self._roster_key: upon}

        return self.take_number("members", at_least=at_least, look=look)

    def keep(self) -> None:
        """Renew the job's lease. If it is gone, the next write creates another."""
        if self._lease is None and (there := self._store.get(self._lease_key)) is not None:
            self._lease = int(there.value)
        if self._lease is not None:
            try:
                self._store.keep_alive(self._lease)
            except LeaseLostError:
                self._lease = None

    def lease(self) -> int | None:
        """Return the job's lease. It is created if there is none."""
        while self._lease is None and self._ttl_s is not None:
            there = self._store.get(self._lease_key)
            if there is not None:
                self._lease = int(there.value)
                break
            mine = self._store.grant(self._ttl_s)
            if self._store.commit(expect={self._lease_key: 0}, put={self._lease_key: str(mine).encode()}, lease=mine):
                self._lease = mine
            else:  # another agent was faster
                self._store.revoke(mine)
        return self._lease

    def remove_all(self, answering: Mapping[str, int] | None = None, wait_s: float = 0.0) -> bool:
        """Delete the job's keys, unless a node is there or may come back. Returns False then.

        `answering`: nodes whose agents answer, and their incarnations; None: all. One of them without a key has lost
        its lease in an outage, and a silent node of the job may only be asleep. Keys of other nodes are waited for, for
        up to `wait_s`: a dead node's key goes with its lease.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            items = self._store.list(self.prefix).items
            there = [item.key.removeprefix(self.node("")) for item in items if item.key.startswith(self.node(""))]
            if there:
                if answering is None or set(there) & set(answering) or time.monotonic() >= deadline_s:
                    return False
                time.sleep(_LOOK_AGAIN_S)
                continue
            is_outlived = read_life(self._store, self.life)[1].number > life_of(self.life)
            if not is_outlived and may_come_back(_values(self.prefix, items), set((answering or {}).values())):
                return False
            if self.remove(items):
                return True

    def remove(self, items: Sequence[Item]) -> bool:
        """Delete these of the job's keys, and its lease, if none has changed."""
        expect = {item.key: item.revision for item in items}
        there, life = read_life(self._store, self.life)
        put = epitaph(self.life, _values(self.prefix, items))
        lease = self._store.grant(ENDED_TTL_S) if put else None
        # The keys common to all lives stay if the job goes on in a later one.
        last = [self._hint, life_key(self.life)] if scope(job_of(self.life), life.number) == self.life else []
        expect_all = {**expect, life_key(self.life): there}
        if self._store.commit(expect=expect_all, put=put, delete=[*expect, *last], lease=lease) is None:
            return False
        for item in [item for item in items if item.key == self._lease_key]:
            self._store.revoke(int(item.value))
        self._lease = None
        return True

    def commit(self, expect: Mapping[str, int], put: Mapping[str, bytes]) -> int | None:
        """Commit under the job's lease. If the lease is lost, its keys went with it, and a new one is created."""
        while True:
            try:
                revision = self._store.commit(expect=expect, put=put, lease=self.lease())
            except LeaseLostError:
                self._lease = None
            else:
                self.newest_revision = max(self.newest_revision, revision or 0)
                return revision

    def _get(self, key: str) -> Item | None:
        there = self._store.get(key)
        self.newest_revision = max(self.newest_revision, there.revision if there is not None else 0)
        return there

    @staticmethod
    def read(item: Item) -> dict[str, Any]:
        """Return the value of a key that `put_once` wrote."""
        value: dict[str, Any] = json.loads(item.value)
        return value

    def records(self, items: Mapping[str, Item]) -> dict[str, NodeRecord]:
        """Return the records of all nodes by name."""
        found = [decode_record(item.value) for key, item in items.items() if key.startswith(self.node(""))]
        return {record.name: record for record in found}

    def left(self, items: Mapping[str, Item]) -> frozenset[int]:
        """Return the incarnations of the nodes that have left in good order."""
        return incarnations("left", (key.removeprefix(self.prefix) for key in items))


def _values(prefix: str, items: Sequence[Item]) -> dict[str, bytes]:
    """Return the values by key, without the prefix of the keys."""
    return {item.key.removeprefix(prefix): item.value for item in items}


def is_older(checkpoint: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's record is older than the other one, by life and then by step."""
    return bool((checkpoint["life"], checkpoint["step"]) < (other["life"], other["step"]))


encode_view = encode_record = encode_roster = msgspec.json.encode
decode_view, decode_record, decode_roster = remembering(View, 4), remembering(NodeRecord, 1024), remembering(Roster, 2)
