"""How nodes and workers come in: the roll call, the start of workers, their hello, joiners. A layer of `core`."""

from __future__ import annotations

from elastrain.agent_messages import Hello, Refused
from elastrain.launcher.requests import fault_fields, fault_message
from elastrain.launcher.roll import WARM_UP
from elastrain.launcher.values import (
    Command,
    Kill,
    Log,
    Node,
    NodeRecord,
    PutSpec,
    Roster,
    Stage,
    Start,
    TakeNumber,
    Tell,
    Worker,
)
from elastrain.launcher.viewing import Viewing
from elastrain.membership import spec_difference


class Joining(Viewing):
    """From the agent's start to a worker's place in the view."""

    # ---- nodes

    def begin(self, record: NodeRecord, now: float) -> list[Command]:
        """This node is registered as `record` says."""
        self.record = record
        if not self.config.alone:
            self._deadlines_s["rendezvous"] = now + self.config.join_timeout_s
        return self._settle(now)

    def on_record(self, record: NodeRecord, now: float) -> list[Command]:
        """A node came, or says something new of itself."""
        known = self.nodes.get(record.name)
        if self.end is not None or record.name == self.config.node:
            return []
        if known is not None and known.record.incarnation == record.incarnation:
            known.record, known.leased = record, True
            return self._settle(now)
        commands: list[Command] = [Log(event="node", fields={"node": record.name, "incarnation": record.incarnation})]
        if known is not None:
            commands += self._on_node_dead(known, "its name is taken by its successor", now)
        self.nodes[record.name] = Node(record=record)
        return commands + self._settle(now)

    def _on_node_dead(self, node: Node, why: str, now: float) -> list[Command]:
        raise NotImplementedError

    def on_roster(self, roster: Roster, now: float) -> list[Command]:
        """The nodes that begin the job are known: start this one's workers."""
        if self.roster is not None or self.end is not None:
            return []
        self.roster = roster
        for name in ("rendezvous", "last call"):
            self._deadlines_s.pop(name, None)
        first = roster.first_rank(self.config.node, self.config.incarnation)
        if first is None:
            return self._begin_late()
        return [self._start(slot, number=first + slot, rank=first + slot) for slot in range(self.config.workers)]

    def _begin_late(self) -> list[Command]:
        if len(self._present()) > self.config.nodes_max:
            there = ", ".join(record.name for record in self._present() if record.name != self.config.node)
            sentence = f"the job has all its {self.config.nodes_max} nodes ({there}): raise MAX in --nnodes to add more"
            return self._finish(1, sentence, everywhere=False)
        self._vacancies.extend((slot, "") for slot in range(self.config.workers))
        return [TakeNumber() for _ in range(self.config.workers)]

    # ---- workers

    def on_number(self, number: int, now: float) -> list[Command]:
        """The number of a new member: it takes the place that waits longest."""
        if self.end is not None or not self._vacancies:
            return []
        slot, of = self._vacancies.popleft()
        first = self.roster.first_rank(self.config.node, self.config.incarnation) if self.roster is not None else None
        beginning = first if self.view is None else None
        rank = len(self._alive_in_view()) + (0 if of else slot) if beginning is None else beginning + slot
        start = self._start(slot, number=number, rank=rank)
        self.workers[start.member].replaces = of
        self._deadlines_s[WARM_UP + start.member] = now + self.config.warm_up_s
        return [start, *([Log(event="restart", fields={"member": start.member, "of": of})] if of else [])]

    def _start(self, slot: int, *, number: int, rank: int) -> Start:
        assert self.roster is not None
        member, initial = f"m{number}", not self.late and self.view is None
        self.workers[member] = Worker(id=member, slot=slot, initial=initial)
        names = [record.name for record in self.roster.nodes]
        return Start(
            member=member,
            slot=slot,
            rank=rank,
            restarts=self.restarts,
            warm_up=not initial,
            world_size=max(self.roster.workers, rank + 1),
            group_rank=names.index(self.config.node) if self.config.node in names else len(names),
            group_world_size=max(len(names), len(self.nodes) + 1),
        )

    def on_start_failed(self, member: str, problem: str) -> list[Command]:
        """The process could not even be started. The others can go on without it, unless it is one of the first."""
        worker = self.workers[member]
        worker.stage = Stage.GONE
        self._deadlines_s.pop(WARM_UP + member, None)
        sentence = f"{member} could not be started: {problem}"
        if worker.initial:
            return self._finish(1, sentence)
        return [Log(event="start_failed", fields={"member": member, "reason": problem}, say=sentence)]

    # ---- hello

    def _on_hello(self, worker: Worker, hello: Hello, now: float) -> list[Command]:
        if worker.stage is not Stage.STARTING or hello.member != worker.id:
            return self.on_bad_message(worker.id, f"a hello of {hello.member} from {worker.id}, {worker.stage}")
        if self.spec is not None:
            return self._admit(worker, hello, now)
        self._unchecked.append((worker, hello))
        return [PutSpec(spec=dict(hello.spec))] if len(self._unchecked) == 1 else []

    def on_spec(self, spec: dict[str, object], now: float) -> list[Command]:
        """What all members must have in common, as the store holds it."""
        if self.spec is not None or self.end is not None:
            return []
        self.spec = spec
        waiting, self._unchecked = self._unchecked, []
        commands: list[Command] = []
        for worker, hello in waiting:
            if worker.stage is Stage.STARTING:
                commands += self._admit(worker, hello, now)
        return commands

    def on_bad_message(self, member: str, problem: str) -> list[Command]:
        return [Kill(member=member, reason=f"{member} sent what no worker sends: {problem}")]

    def _admit(self, worker: Worker, hello: Hello, now: float) -> list[Command]:
        assert self.spec is not None
        difference = spec_difference(self.spec, hello.spec)
        if difference:
            return self._refuse(worker, difference, now)
        worker.stage, worker.address = Stage.READY, hello.address
        commands: list[Command] = [Log(event="ready", fields={"member": worker.id, "address": hello.address})]
        mine = [f for f in self._faults if f.member == worker.id or f.node == self.config.node]
        self._faults = [f for f in self._faults if f not in mine]
        for fault in mine:
            commands.append(Log(event="fault", fields=fault_fields(fault)))
            commands.append(Tell(member=worker.id, message=fault_message(fault)))
        if self.view is None and worker.initial:
            # Counted from the first hello: a plain script never says hello and may run as long as it likes.
            self._deadlines_s.setdefault("join", now + self.config.join_timeout_s)
        return commands + self._settle(now)

    def _refuse(self, worker: Worker, difference: str, now: float) -> list[Command]:
        worker.refused = True
        sentence = f"{worker.id} is refused: {difference}"
        commands: list[Command] = [
            Tell(member=worker.id, message=Refused(reason=sentence)),
            Log(event="refused", fields={"member": worker.id, "reason": difference}, say=sentence),
        ]
        if worker.initial:
            return commands + self._finish(1, sentence)
        self._must_leave(worker, now + self.config.leave_timeout_s)
        return commands

    # ---- those who do not come

    def _on_rendezvous_timeout(self) -> list[Command]:
        there = [record.name for record in self._present()]
        sentence = (
            f"{len(there)} of at least {self.config.nodes_min} nodes came within {self.config.join_timeout_s:g} s "
            f"({', '.join(there)}): start the others with the same --rdzv-id and --rdzv-endpoint, or lower MIN in "
            "--nnodes"
        )
        return self._finish(1, sentence)

    def _on_join_timeout(self) -> list[Command]:
        assert self.roster is not None
        waiting = [w.id for w in self.living if w.stage is not Stage.READY]
        others = [record for record in self._first_nodes() if record.name != self.config.node]
        unready = [record.name for record in others if not record.ready]
        unlinked = [record.name for record in others if not self.nodes[record.name].linked]
        missing = [*waiting, *(f"node {name}" for name in unready)]
        if not missing and unlinked:
            return self._finish(1, f"the agent of {', '.join(unlinked)} can not be reached: see --local-addr")
        ready = sum(w.stage is Stage.READY for w in self.living)
        return self._finish(
            1,
            f"{ready} of {self.config.workers} workers were ready within {self.config.join_timeout_s:g} s of the "
            f"first; missing: {', '.join(missing)}. See their output, or raise --join-timeout",
        )
