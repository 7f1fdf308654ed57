"""A job's keys in the store: spec, roster, view, counters, nodes; encoded, and changed by guarded transactions only.

    /elastrain/<job>/nodes/<node>    leased: what the node says of itself
    /elastrain/<job>/job             immutable: what the operator asked for, as far as all nodes must agree
    /elastrain/<job>/roster          immutable: the nodes that began the job; `restored`: the store had lost it
    /elastrain/<job>/spec            immutable: what every member must have in common
    /elastrain/<job>/view            the newest view
    /elastrain/<job>/due             the first commit is due: it may have been made
    /elastrain/<job>/begun           a step has been committed: there is state to lose
    /elastrain/<job>/checkpoint      the newest durable checkpoint that may be seen
    /elastrain/<job>/end             how the job ended, until its last node has left
    /elastrain/<job>/left/<start>    the node of this incarnation has gone in good order while others go on
    /elastrain/<job>/members         how many member ids are used up; /incarnations likewise for starts of nodes
    /elastrain/<job>/lease           the job's own lease, under which this and all of the above but `nodes` lie
    /elastrain/.secrets/<job>        where the job's secret lies; a hint for people, the only value that is not sealed
    /elastrain/.lives/<job>          the life that the job is in; absent in its first
    /elastrain/.ended/<job>          how it ended, for `ENDED_TTL_S` after its last node has left

A later life has the same keys under a name of its own, `<job>~<life>`: what an older one still writes is not read.
The job's lease lives for hours, kept alive by every agent: where all are killed, the store forgets the job in the end.

Encoding and transactions; whether a view is wanted or allowed is decided before. All methods block as the store does.
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
from elastrain.protocol.codec import decoder_of

_LOOK_AGAIN_S = 0.1


class JobKeys:
    """One agent's access to its job's keys, for one thread at a time. `job`: the name of one of its lives.

    `ttl_s`: how long they outlive their last agent; None: as long as the store.
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
        """Of the store, by what calls have been answered: a watch may be behind it."""

    def node(self, name: str) -> str:
        return f"{self.prefix}nodes/{name}"

    def put_next_view(self, view: View, roster: Roster | None = None, seen: set[str] | None = None) -> View | None:
        """`put_view`, but None where not even the roster is in the store: the job is over, or has to be put again.

        roster: of the job that the view belongs to; None where another one is in the store.
        """
        upon, stands = self._roster()
        return None if stands is None or stands != (roster or stands) else self.put_view(view, seen, upon=upon)

    def put_view(self, view: View, seen: set[str] | None = None, *, upon: int | None = None) -> View | None:
        """Put the view unless the store holds one as new. Returns the newest that it holds: this one, or another's.

        None: the store lacks the view before it, the job is over, the roster is no longer that of the revision `upon`
        (None: it may be), or nobody of the view before it is in this one and what that rests upon is not all `seen`:
        keys of its nodes, and that the first commit is due.
        """
        end, due, begun = (self.prefix + key for key in ("end", "due", "begun"))
        while True:
            there, newest = self.newest_view()
            if newest is not None and newest.generation >= view.generation:
                return newest
            # A store without it has lost its data, or the job's last node has taken the keys along: whoever slept
            # meanwhile must not go on alone from what it remembers.
            if (newest.generation if newest is not None else 0) != view.generation - 1:
                return None
            gone = newest.members if newest is not None and set(newest.ids).isdisjoint(view.ids) else ()
            signs = {due, *(self.node(member.node) for member in gone)} if gone else set()
            absent = [end, *(signs.difference(seen) if seen is not None else ())]
            if any(self._store.get(key) is not None for key in absent):
                return None
            # Who proposes may not have heard of the first commit yet: members that all come new must not begin again.
            has_begun = self._store.get(begun)
            view = view if has_begun is None or view.begun else replace(view, begun=True)
            expect = {self.view_key: there, begun: 0 if has_begun is None else has_begun.revision}
            if upon is not None:  # between that look and this, the last node may have taken everything along
                expect[self._roster_key] = upon
            if self.commit({**expect, **dict.fromkeys(absent, 0)}, {self.view_key: encode_view(view)}) is not None:
                return view
            if upon is not None and self._roster()[0] != upon:
                return None

    def put_view_again(self, view: View, roster: Roster | None = None) -> View:
        """Put the view that stood into a store that has lost it. Returns the newest that it holds, as `put_view`.

        roster: of the job that it belongs to. Where another job has begun meanwhile, nothing is put.
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
        """Its revision, 0 for none, and the view that the store holds."""
        there = self._get(self.view_key)
        return (0, None) if there is None else (there.revision, decode_view(there.value))

    def _roster(self) -> tuple[int, Roster | None]:
        """Likewise."""
        there = self._get(self._roster_key)
        return (0, None) if there is None else (there.revision, decode_roster(there.value))

    def has_roster(self) -> bool:
        return self._roster()[1] is not None

    def put_spec(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Put the spec if there is none. Returns the one that the store holds."""
        return dict(self.put_once("spec", spec))

    def put_roster(
        self, roster: Roster, used: int = 0, life: Life | None = None, *, seen: Mapping[str, int] | None = None
    ) -> Roster | None:
        """Likewise; the ids of the roster's workers are used up with it, and all below `used`. Raises OutlivedError.

        life: said with it, in case the store has lost that, too. seen: keys by which it was made, and their revisions;
        None is returned, and nothing put, where they have changed: a store that has lost its data, say, may have
        forgotten another roster.

        An emptied store says to whoever comes that the job is in its first life, until the others have put again what
        stood: who has read that must not begin the job beside them.
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
        """Name it as the newest while the member is in the view that stands. Returns why not; empty: it is done."""
        key = self.prefix + "checkpoint"
        while True:
            revision, view = self.newest_view()
            if view is None or told.member not in view:
                return f"{told.member} is no longer a member of the job"
            there = self._get(key)
            value = {"life": told.life, "step": told.step, "name": told.name, "generation": view.generation}
            # The same one again is right: who made it visible was lost before it could tell the others.
            if there is not None and is_older(value, before := self.read(there)):
                return f"the checkpoint of step {before['step']} is newer"
            expect = {self.view_key: revision, key: there.revision if there is not None else 0}
            if self.commit(expect, {key: json.dumps(value, sort_keys=True).encode()}) is not None:
                return ""

    def put_checkpoint_again(self, value: Mapping[str, Any]) -> None:
        """Put what stood of the newest one into a store that has lost it, or holds an older one."""
        key = self.prefix + "checkpoint"
        while True:
            there = self._get(key)
            if there is not None and not is_older(self.read(there), value):
                return
            expect = {key: there.revision if there is not None else 0}
            if self.commit(expect, {key: json.dumps(value, sort_keys=True).encode()}) is not None:
                return

    def raise_number(self, counter: str, at_least: int) -> None:
        """So many are used up, should the store have forgotten."""
        key = self.prefix + counter
        while True:
            there = self._store.get(key)
            if there is not None and int(there.value) >= at_least:
                return
            revision = there.revision if there is not None else 0
            if self.commit({key: revision}, {key: str(at_least).encode()}) is not None:
                return

    def take_number(self, counter: str, *, at_least: int = 0, look: Callable[[], Mapping[str, int]] = dict) -> int:
        """The next number that nobody has taken. `at_least`: what is known to be used up, should the store forget.

        look: says before each try which keys have to stay as they are, and their revisions.
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
        """The number of a new member. Raises StoreUnavailableError while the job's roster is not there.

        Without one the job is over, or its keys have to be put again first: a count from nothing would give numbers
        twice. With another one the count is another job's. And whoever begins the next life has counted, too.
        """

        def look() -> dict[str, int]:
            there, life = read_life(self._store, self.life)
            upon, stands = self._roster()
            if stands is None or stands != (roster or stands) or life.number > life_of(self.life):
                raise StoreUnavailableError("the job's roster is not in the store")
            return {life_key(self.life): there, self._roster_key: upon}

        return self.take_number("members", at_least=at_least, look=look)

    def keep(self) -> None:
        """Start the time of the job's lease anew. If it is gone, whoever writes next takes another."""
        if self._lease is None and (there := self._store.get(self._lease_key)) is not None:
            self._lease = int(there.value)
        if self._lease is not None:
            try:
                self._store.keep_alive(self._lease)
            except LeaseLostError:
                self._lease = None

    def lease(self) -> int | None:
        """The job's lease; taken, if there is none."""
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
        """Delete the job's keys, unless a node is there, or may come back. False if one does.

        `answering`: nodes whose agents answer, and their incarnations. One of them that has no key, and has not said
        that it goes, has lost its lease in an outage; one of the job's that does not answer may only sleep. Nodes with
        a key outside of it (by default all count as answering) are waited for: a dead one's key goes with its lease,
        after at most `wait_s`, and nobody comes after the last to take the others along.
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
        """Delete these of the job's keys, and its lease, if all are still as they were."""
        expect = {item.key: item.revision for item in items}
        there, life = read_life(self._store, self.life)
        put = epitaph(self.life, _values(self.prefix, items))
        lease = self._store.grant(ENDED_TTL_S) if put else None
        # The keys of the job itself stay where it goes on in a later life.
        last = [self._hint, life_key(self.life)] if scope(job_of(self.life), life.number) == self.life else []
        expect_all = {**expect, life_key(self.life): there}
        if self._store.commit(expect=expect_all, put=put, delete=[*expect, *last], lease=lease) is None:
            return False
        for item in [item for item in items if item.key == self._lease_key]:
            self._store.revoke(int(item.value))
        self._lease = None
        return True

    def commit(self, expect: Mapping[str, int], put: Mapping[str, bytes]) -> int | None:
        """Under the job's lease. Where that was lost, its keys went with it, and another takes its place."""
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
        """The value of a key that `put_once` wrote."""
        value: dict[str, Any] = json.loads(item.value)
        return value

    def records(self, items: Mapping[str, Item]) -> dict[str, NodeRecord]:
        """Node name -> what it says of itself."""
        found = [decode_record(item.value) for key, item in items.items() if key.startswith(self.node(""))]
        return {record.name: record for record in found}

    def left(self, items: Mapping[str, Item]) -> frozenset[int]:
        """The incarnations that have gone in good order."""
        return incarnations("left", (key.removeprefix(self.prefix) for key in items))


def _values(prefix: str, items: Sequence[Item]) -> dict[str, bytes]:
    """Name within the life's keys -> value."""
    return {item.key.removeprefix(prefix): item.value for item in items}


def is_older(checkpoint: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Of two records of durable checkpoints: by life, then by step."""
    return bool((checkpoint["life"], checkpoint["step"]) < (other["life"], other["step"]))


encode_view = encode_record = encode_roster = msgspec.json.encode
decode_view, decode_record, decode_roster = decoder_of(View), decoder_of(NodeRecord), decoder_of(Roster)
