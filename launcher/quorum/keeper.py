"""The thread that keeps this node's part of the quorum, from the founding until the node ends.

Once a second it lists the members, lets `core.quorum.quorum_members` decide, and carries that out. etcd's process
belongs to this thread, so that it ends with the agent however that ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastrain.errors import ElastrainError
from elastrain.launcher.core.quorum.founding import MEMBERS_MAX, majority
from elastrain.launcher.core.quorum.quorum_members import (
    LOST_S,
    AddMe,
    EndedEtcd,
    Observed,
    Promote,
    QuorumMember,
    Remove,
    decide,
    keeps_data,
    meaning,
)
from elastrain.launcher.quorum.candidates import Candidates
from elastrain.launcher.quorum.etcd_admin import EtcdAdmin, Listed
from elastrain.launcher.quorum.etcd_process import EtcdProcess, Membership
from elastrain.launcher.quorum.founding_round import FoundingRounds
from elastrain.launcher.quorum.node_standing import NodeStanding
from elastrain.launcher.store.port import StoreError

ROUND_S = 0.2
"""Seconds between two rounds of the founding."""
LOOK_S = 1.0
"""Seconds between two looks at the members."""
LEAVE_S = 8.0
"""Longest time for a member to leave in good order. etcd refuses a removal within 5 s of a lost connection."""
PAUSE_S = 60.0
"""Seconds for which a node is no candidate after its member has ended before it had a vote: its disk may be full."""
Tell = Callable[[str, str], None]
"""Function that is told a kind of event and a sentence about it."""


@dataclass
class MemberRecord:
    """Record of the members, kept by the thread alone. Times are monotonic."""

    seen_s: dict[str, float] = field(default_factory=dict)
    """Member id -> time of its last answer, or at which it was first listed."""
    size: int = 0
    """Number of voters that was told last."""
    has_voted: bool = False
    """True once this node's present member had a vote."""
    paused_until_s: float = 0.0


class Keeper:
    """The thread. `tell` gets the sentences for the screen and the event log."""

    def __init__(
        self,
        standing: NodeStanding,
        founding: FoundingRounds,
        etcd: EtcdProcess,
        admin: EtcdAdmin,
        candidates: Candidates,
    ) -> None:
        self._standing, self._founding, self._etcd = standing, founding, etcd
        self._admin, self._candidates = admin, candidates
        self._record = MemberRecord()
        self._error: ElastrainError | OSError | None = None
        self._ready, self._stop = threading.Event(), threading.Event()
        self.tell: Tell = lambda _kind, _sentence: None
        self._thread = threading.Thread(target=self._run, name="elastrain-quorum", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the quorum works. Returns False after the time-out. Raises the error that ended the founding."""
        done = self._ready.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return done

    def close(self) -> None:
        """Leave the quorum, stop etcd, and remove its data."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self._ready.is_set():
                if self._founding.play():
                    self._ready.set()
                self._stop.wait(0.0 if self._ready.is_set() else ROUND_S)
            while not self._stop.is_set():
                self._look()
                self._stop.wait(LOOK_S)
            if self._ready.is_set():
                self._leave()
        except (ElastrainError, OSError) as error:
            if self._ready.is_set():
                self.tell("quorum_failed", f"this node takes part in the quorum no more: {error}")
            self._error = error
            self._ready.set()
        finally:
            self._founding.close()
            self._candidates.close()
            self._etcd.stop()

    def _look(self) -> None:
        """Look at the members once, and carry out what is decided. An outage changes nothing."""
        if self._etcd.has_ended:
            self._after_end_of_etcd()
        try:
            if time.monotonic() >= self._record.paused_until_s:
                self._candidates.keep(self._standing.instance)
            listed = self._admin.members(self._standing.endpoints())
            self._standing.use(tuple(member.client for member in listed if member.client and not member.is_learner))
            voters = [member for member in listed if not member.is_learner]
            self._record.has_voted |= any(member.name == self._standing.instance for member in voters)
            self._tell_size(len(voters))
            if self._etcd.is_started and self._is_outside(listed):
                self._begin_anew("etcd has removed this member")
            # Hundreds of nodes without a member need not look at each other's keys every second.
            if self._etcd.is_started or len(voters) < MEMBERS_MAX:
                self._carry_out(listed)
        except StoreError as error:
            self.tell("quorum_silent", str(error))

    def _is_outside(self, listed: tuple[Listed, ...]) -> bool:
        """Return True if etcd here belongs to a member that is no longer listed."""
        own = self._standing.identity.ports.peer
        return not any(member.peer == own and member.name in ("", self._standing.instance) for member in listed)

    def _carry_out(self, listed: tuple[Listed, ...]) -> None:
        observed = self._observe(listed)
        decision = decide(observed)
        action = decision.action
        if isinstance(action, Remove):  # decided once more, because the member may have come back meanwhile
            action = decide(self._observe(self._admin.members(self._standing.endpoints()))).action
        if action is None:
            return
        endpoints = self._standing.endpoints()
        match action:
            case Remove(member=member):
                self._admin.remove(endpoints, member)
                self.tell("quorum_removed", f"an etcd member was removed: {decision.reason}")
            case Promote(member=member):
                self._admin.promote(endpoints, member)
                self.tell("quorum_promoted", "an etcd member was added")
            case AddMe():
                self._add_me(endpoints)

    def _add_me(self, endpoints: tuple[str, ...]) -> None:
        identity, instance = self._standing.identity, self._standing.instance
        members = self._admin.add_learner(endpoints, identity.ports.peer)
        cluster = tuple((member.name or instance, member.peer) for member in members)
        charter = self._standing.state.started
        assert charter is not None
        self._etcd.start(Membership(name=instance, cluster=cluster, token=charter.token, is_new=False))
        self.tell("quorum_added", "this node becomes an etcd member")

    def _observe(self, listed: tuple[Listed, ...]) -> Observed:
        """Return what the decision needs. Only etcd members look whether the other members answer."""
        own, now = self._standing.identity.ports.client, time.monotonic()
        mine = next((member for member in listed if member.name == self._standing.instance), None)
        leads = False
        for member in listed:
            self._record.seen_s.setdefault(member.id, now)
            if mine is None or not member.client:
                continue
            try:
                leader = self._admin.leader(member.client)
            except StoreError:
                continue
            self._record.seen_s[member.id] = time.monotonic()
            leads = leads or (member.client == own and leader == mine.id)
        now = time.monotonic()
        return Observed(
            members=tuple(
                QuorumMember(
                    id=member.id,
                    instance=member.name,
                    is_learner=member.is_learner,
                    silent_s=now - self._record.seen_s[member.id] if mine is not None else 0.0,
                )
                for member in listed
            ),
            candidates=self._candidates.list(),
            me=self._standing.instance,
            leads=leads,
        )

    def _after_end_of_etcd(self) -> None:
        """Start etcd again, with its data if the quorum does not work without it."""
        own = self._standing.identity.ports.client
        others = tuple(each for each in self._standing.endpoints() if each != own)
        try:
            works = bool(self._admin.members(others))
        except StoreError:
            works = False
        if keeps_data(EndedEtcd(others_work=works)):
            self.tell("quorum_restarted", f"etcd here had ended and is started again: {self._etcd.last_words()}")
            self._etcd.start_again()
        else:
            self._begin_anew("etcd here had ended")

    def _begin_anew(self, reason: str) -> None:
        """Give up the data of this member. The node comes back as a new one, after the quorum has removed the old."""
        self._candidates.withdraw()
        self._etcd.stop()
        self._standing.begin_anew()
        now, comes = time.monotonic(), "this node comes back as a new etcd member"
        if not self._record.has_voted:
            self._record.paused_until_s = now + PAUSE_S
            comes = f"this node is no etcd member for {PAUSE_S:g} s"
        self._record.has_voted = False
        self.tell("quorum_anew", f"{reason}: {comes}")

    def _tell_size(self, voters: int) -> None:
        if voters != self._record.size:
            self._record.size = voters
            self.tell("quorum", meaning(voters))

    def _leave(self) -> None:
        """Remove this node's member, so that the others keep their majority. Gives up after LEAVE_S."""
        until_s = time.monotonic() + LEAVE_S
        self._candidates.withdraw()
        while self._etcd.is_started and time.monotonic() < until_s:
            try:
                if self._has_left():
                    return
            except StoreError as error:
                self.tell("quorum_silent", str(error))
            time.sleep(ROUND_S)

    def _has_left(self) -> bool:
        """Remove lost members and then this one. Returns True if there is nothing left to do."""
        endpoints = self._standing.endpoints()
        listed = self._admin.members(endpoints)
        mine = next((member for member in listed if member.name == self._standing.instance), None)
        others = [member for member in listed if member is not mine]
        if mine is None or not others:
            return True
        observed = self._observe(listed)
        living = [seen for seen in observed.members if seen.id != mine.id and seen.silent_s < LOST_S]
        absent = [seen for seen in observed.members if seen not in living and seen.id != mine.id]
        if not living or len(living) < majority(len(others)):
            return not any(observed.is_present(seen) for seen in absent)
        self._admin.remove(endpoints, mine.id)
        return True
