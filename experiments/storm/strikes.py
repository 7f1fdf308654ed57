"""Strikes the faults of a case in its running job: when each is due, whom it takes, and who is let go on again."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastrain.errors import ElastrainError
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.operator_messages import AskState
from elastrain.launcher.shared.rundir import RunDir
from experiments.journals import Follower, Run
from experiments.storm.cases import LONG_S, LOSSES, ROOM_FOR_COMMITS, Case, Fault
from experiments.storm.moments import at_moment
from experiments.storm.permission import (
    COMMITS_BETWEEN,
    Mismatches,
    Permission,
    Told,
    commits,
    commits_in_newest_view,
    may_lose,
    may_lose_since,
    spare,
    still_told,
)
from experiments.storm.processes import Processes

HEARD_AGAIN_S = 4.0
"""After it was let go on: how long somebody may still be taken for lost."""
ASK_EVERY_S, ASK_MOMENTS_EVERY_S = 0.05, 0.3
MOMENT_WAIT_S, RECOVERY_WAIT_S = 20.0, 2.0
"""So long a strike waits for its moment; then any moment will do. A recovery begins at once or not at all."""
LOOK_EVERY_S, WATCH_EVERY_S = 0.01, 0.002
NEWCOMER_WAIT_S = 10.0
"""So long a strike waits for a worker that is starting; then there is none."""


@dataclass(frozen=True, kw_only=True)
class Victim:
    """Processes, and the members that may be lost with them."""

    name: str
    pids: tuple[int, ...]
    members: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Striker:
    """`look` is called again and again while the job runs."""

    case: Case
    folder: Path
    processes: Processes
    follower: Follower
    kills: int = 0
    stops: int = 0
    struck: list[str] = field(default_factory=list)
    last_event_s: float = field(default_factory=time.monotonic)
    """When somebody was struck or let go on."""
    _doubts: Mismatches = field(default_factory=Mismatches)
    _stopped: dict[int, float] = field(default_factory=dict)
    """Process -> when it goes on."""
    _stopped_nodes: dict[str, float] = field(default_factory=dict)
    _next: int = 0
    _since: int | None = None
    """Commits at the last strike; None before the first commit."""
    _due_s: float | None = None
    _waits_since_s: float = 0.0
    _asked_s: float = 0.0
    """When it was last found out whether a strike is allowed."""
    _held: bool = False
    _told: Told | None = None
    _told_view: int = 0
    """Number of views up to the one in which it was told."""
    _told_s: float = 0.0

    @property
    def run(self) -> Run:
        return self.follower.run

    def look(self) -> None:
        """Let go on who was stopped for long enough; strike what is due and allowed."""
        now_s = time.monotonic()
        self._let_go_on(now_s)
        if self._since is None and commits(self.run):
            self._since = commits(self.run)
        # Once the last step is committed, what is killed is a script that has finished its work: that is an error.
        if self._next < len(self.case.faults) and commits(self.run) < self.case.training.steps:
            fault = self.case.faults[self._next]
            if fault.when == "start":
                self._try_before_the_first_commit(fault, now_s)
            elif self._since is not None:
                self._try(fault, now_s)
        self._hold()

    @property
    def look_again_s(self) -> float:
        """How soon: moments are short."""
        return WATCH_EVERY_S if self._due_s is not None else LOOK_EVERY_S

    def let_all_go_on(self) -> None:
        self._let_go_on(math.inf)

    def states(self) -> list[dict[str, Any]]:
        """What the agents say that can answer."""
        found = []
        for node in rundir.nodes_of(RunDir(path=self.folder)):
            if node.path.name in self._stopped_nodes or ("node0" in self._stopped_nodes and self.case.nodes == 1):
                continue
            try:
                found.append(operator_messages.ask(node, AskState()).state)
            except (ElastrainError, OSError, KeyError):  # it has ended, or has just been killed
                continue
        return found

    # ------------------------------------------------------------------------------------------------------------ when

    def _try(self, fault: Fault, now_s: float) -> None:
        if self._due_s is None:
            if commits(self.run) - (self._since or 0) < fault.commits:
                return
            self._due_s = self._waits_since_s = now_s
            if fault.target != "newcomer" and fault.when == "random":
                self._due_s += fault.delay_ms / 1000
        if fault.when != "random" and not self._is_any_moment(fault, now_s):
            self._try_at_moment(fault, now_s)
            return
        if now_s < max(self._due_s, self._asked_s + ASK_EVERY_S) or (
            fault.target == "newcomer" and self._waits_for_newcomer(fault, now_s)
        ):
            return
        self._asked_s = now_s
        victim = self._victim(fault)
        allowed = self._may(fault, victim) if victim is not None else Permission(yes=False, reason="nobody is there")
        if victim is not None and allowed.yes:
            self._strike(fault, victim, allowed)
        elif victim is None and now_s - self._waits_since_s > NEWCOMER_WAIT_S:
            self._pass_over(fault)

    def _is_any_moment(self, fault: Fault, now_s: float) -> bool:
        wait_s = {"random": 0.0, "recovering": RECOVERY_WAIT_S}.get(fault.when, MOMENT_WAIT_S)
        return now_s - self._waits_since_s >= wait_s

    def _try_at_moment(self, fault: Fault, now_s: float) -> None:
        """Without a question between the look and the strike: what the job told shortly before must do."""
        if now_s - self._told_s > ASK_MOMENTS_EVERY_S:
            self._ask(now_s)
            self.follower.look()
        living = self._members()
        since = at_moment(fault.when, self.run, living, self.case)
        those = [m for m in living if m in since and time.monotonic() >= since[m] + fault.delay_ms / 1000]
        if not those:
            return
        victim = self._victim_at(fault, self._picked(fault, those))
        if victim is None:
            return
        doubts = self._doubts.now(self.run, now_s)
        told = still_told(self._told, (view.members for view in self.run.views[self._told_view :]))
        allowed = may_lose_since(victim.members, told=told, living=living, doubts=doubts)
        if allowed.yes:
            self._strike(fault, victim, allowed)

    def _ask(self, now_s: float) -> None:
        """How redundant the job is, where its newest view has had its commits and nobody is in doubt."""
        self._told_s = now_s
        if commits_in_newest_view(self.run) < COMMITS_BETWEEN or self._doubts.now(self.run, now_s):
            return
        view, number = self.run.views[-1], spare(self.states())
        if number is not None and set(self._members()) == set(view.members):
            self._told, self._told_view = Told(members=view.members, spare=number), len(self.run.views)

    def _try_before_the_first_commit(self, fault: Fault, now_s: float) -> None:
        """Stopped first: if nothing was computed by then, no step can have been committed."""
        if self._has_computed():
            self._pass_over(fault)
            return
        begun_s = max((*self.run.started_s.values(), self.last_event_s), default=math.inf)
        living = [m for m in self.run.started_s if self._lives(m)]
        if not living or now_s < begun_s + fault.delay_ms / 1000:
            return
        victim = self._victim_at(fault, self._picked(fault, living))
        if victim is None:
            return
        for pid in victim.pids:
            self.processes.signal(pid, signal.SIGSTOP)
        self.follower.look()
        if self._has_computed():
            for pid in victim.pids:
                self.processes.signal(pid, signal.SIGCONT)
            self._pass_over(fault)
        else:
            self._strike(fault, victim, Permission(yes=True, reason="nothing is computed yet"))

    def _has_computed(self) -> bool:
        return any(member.micro_batches or member.passed for member in self.run.members.values())

    def _waits_for_newcomer(self, fault: Fault, now_s: float) -> bool:
        starting = self._newcomers()
        if starting:
            begun_s = self.run.started_s[self._picked(fault, starting)]
            return now_s < begun_s + fault.delay_ms / 1000
        return now_s - self._waits_since_s < NEWCOMER_WAIT_S

    def _may(self, fault: Fault, victim: Victim) -> Permission:
        now_s = time.monotonic()
        silent = fault.target in ("agent", "node", "etcd") and fault.stopped_s >= LONG_S and self.case.nodes > 1
        if fault.kind == "stop" and not silent:
            return Permission(yes=True, reason="it goes on")
        if fault.target == "all":
            there = any(state.get("checkpoint") is not None for state in self.states())
            return Permission(yes=there, reason=f"there is {'a' if there else 'no'} checkpoint to go back to")
        if fault.target in ("loader", "newcomer") and not victim.members:
            return Permission(yes=True, reason="it holds no state")
        return may_lose(
            victim.members, run=self.run, spare=spare(self.states()), doubts=self._doubts.now(self.run, now_s)
        )

    def _pass_over(self, fault: Fault) -> None:
        self.struck.append(f"passed over: {fault}")
        self._go_to_next()

    def _go_to_next(self) -> None:
        self._next, self._since, self._due_s = self._next + 1, commits(self.run) or None, None

    def _hold(self) -> None:
        """Make steps longer while there are few left for the faults that are due."""
        due = len(self.case.faults) - self._next
        wanted = due > 0 and self.case.training.steps - commits(self.run) < ROOM_FOR_COMMITS * due + 2
        if wanted != self._held:
            self._held = wanted
            hold = self.folder / "hold"
            hold.touch() if wanted else hold.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------------------ whom

    def _victim(self, fault: Fault) -> Victim | None:
        run = self.run
        members = self._members()
        if fault.target == "etcd":
            pids = self.processes.etcd()
            return Victim(name="etcd", pids=tuple(pids)) if pids else None
        if fault.target == "agent" and self.case.nodes == 1:
            return Victim(name="the launcher", pids=tuple(run.agents.values()), nodes=("node0",))
        if fault.target == "newcomer":
            starting = self._newcomers()
            if not starting:
                return None
            chosen = self._picked(fault, starting)
            return Victim(name=f"newcomer {chosen}", pids=(run.pids[chosen],))
        if not members:
            return None
        if fault.target == "all":
            return Victim(name="all members", pids=tuple(run.pids[m] for m in members), members=tuple(members))
        return self._victim_at(fault, self._picked(fault, members))

    def _victim_at(self, fault: Fault, chosen: str) -> Victim | None:
        """A member, or what of its kind is where it is."""
        run = self.run
        if fault.target == "member":
            return Victim(name=chosen, pids=(run.pids[chosen],), members=(chosen,))
        if fault.target == "loader":
            loaders = self.processes.loaders(run.pids[chosen])
            return Victim(name=f"a loader of {chosen}", pids=(self._picked(fault, loaders),)) if loaders else None
        return self._node(fault, run.nodes[chosen])

    def _node(self, fault: Fault, node: str) -> Victim | None:
        run = self.run
        inside = tuple(m for m, where in run.nodes.items() if where == node and m not in run.deaths_s)
        agent = run.agents[node]
        if not self.processes.owns(agent):
            return None
        pids = (agent,) if fault.target == "agent" else (agent, *(run.pids[m] for m in inside))
        return Victim(name=f"{fault.target} {node}", pids=pids, members=inside, nodes=(node,))

    def _members(self) -> list[str]:
        """Of the newest view, those who live."""
        inside = self.run.views[-1].members if self.run.views else ()
        return [m for m in inside if self._lives(m)]

    def _lives(self, member: str) -> bool:
        return member not in self.run.deaths_s and self.processes.owns(self.run.pids[member])

    def _newcomers(self) -> list[str]:
        seen = {member for view in self.run.views for member in view.members}
        return [m for m in self.run.started_s if m not in seen and self._lives(m)]

    @staticmethod
    def _picked(fault: Fault, those: Any) -> Any:
        return those[int(fault.pick * len(those))]

    # ---------------------------------------------------------------------------------------------------------- strike

    def _strike(self, fault: Fault, victim: Victim, allowed: Permission) -> None:
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        hit = [pid for pid in victim.pids if self.processes.signal(pid, number)]
        now_s = self.last_event_s = time.monotonic()
        if fault.kind == "kill":
            self.kills += bool(hit)
            self._doubts.strike(victim.members if fault.target in (*LOSSES, "all") else (), math.inf)
        else:
            self.stops += bool(hit)
            self._stopped.update(dict.fromkeys(hit, now_s + fault.stopped_s))
            self._stopped_nodes.update(dict.fromkeys(victim.nodes, now_s + fault.stopped_s))
            if fault.target in ("agent", "node"):
                self._doubts.strike(victim.members, now_s + fault.stopped_s + HEARD_AGAIN_S)
        at_random = fault.when != "start" and self._is_any_moment(fault, now_s)
        self.struck.append(
            f"after commit {commits(self.run)} (t={now_s:.3f}): {fault.kind} {victim.name}"
            + ("" if at_random else f" when {fault.when}")
            + (f" for {fault.stopped_s:g} s" if fault.kind == "stop" else "")
            + f"; {allowed.reason}"
        )
        self._go_to_next()

    def _let_go_on(self, now_s: float) -> None:
        for pid in _passed(self._stopped, now_s):
            self.processes.signal(pid, signal.SIGCONT)
            self.last_event_s = time.monotonic()
        _passed(self._stopped_nodes, now_s)


def _passed(times: dict[Any, float], now_s: float) -> list[Any]:
    """Take out those whose time has come."""
    over = [key for key, until_s in times.items() if until_s <= now_s]
    for key in over:
        del times[key]
    return over
