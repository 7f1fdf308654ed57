"""Nodes' own disks: each survives the processes of its node, may be lost or damaged, and holds what production wrote.

Production runs over them: the launcher's choice (`launcher.checkpoints`, `offers`), manifests, publishing, removing,
and reading, from other nodes' disks too. What lies where is also known apart from manifests: that is the truth which
each choice is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from elastrain.base.checkpoint_settings import LOCAL, CheckpointOptions
from elastrain.base.disk_protocol import DiskRequest
from elastrain.base.resume import NodeDisk, Resume
from elastrain.job.checkpoint_plan import LOOP
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.shared.job_values import End, Life, Roster
from elastrain.launcher.start import start_checkpoint as launcher_checkpoints
from elastrain.launcher.start.run_options import RunOptions
from elastrain.runtime.durable import disk as durable_disk
from elastrain.runtime.durable import member_checkpoints as durable
from elastrain.runtime.durable import node_disks
from elastrain.runtime.durable.stored_initial import _error
from elastrain.snapshot.durable import reading, retention, tensor_sections, writing
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import LOOP as LOOP_STATE
from elastrain.snapshot.durable.manifest import MANIFEST, Part, place_in_time
from elastrain.snapshot.durable.places.node import ServedDisk
from elastrain.snapshot.durable.places.port import Source
from tests.sim.job.disk import LACKING, Manifest
from tests.sim.job.memory_place import MemoryPlace
from tests.sim.member import Violation

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess
    from tests.sim.job.member import MemberProcess
    from tests.sim.job.world import World

KEEP = 1


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one disk has at a moment, by the truth: what is damaged counts only where nobody can see that there."""

    manifests: frozenset[str]
    """Checkpoints that can be seen there: without its manifest nobody can tell whether a copy is damaged."""
    copies: Mapping[str, frozenset[int]]
    """Checkpoint -> shards; LOOP stands for the loop's state."""

    def proven(self) -> Seen:
        """What can be checked there."""
        copies = {name: shards for name, shards in self.copies.items() if name in self.manifests}
        return replace(self, copies=copies)


def newest_whole(disks: Iterable[Seen], shards: int) -> str:
    """The newest checkpoint of which the disks together have everything; empty where there is none."""
    disks = list(disks)
    named = {name for disk in disks for name in disk.manifests}
    wanted = {LOOP, *range(shards)}
    whole = [name for name in named if wanted <= {s for disk in disks for s in disk.copies.get(name, ())}]
    return max(whole, key=when, default="")


def when(name: str) -> tuple[int, int]:
    return place_in_time(name) or (-1, -1)


class NodeDisks:
    """`is_full`: none of them takes anything more. See `disk.Disk` for what launchers and members ask."""

    def __init__(self, world: World, shards: int) -> None:
        self._world, self.shards = world, shards
        self.is_full = False
        self.places: dict[str, MemoryPlace] = {}
        self.contents: dict[str, frozenset[int]] = {}
        """CHECKPOINT/FILE -> the shards in it."""
        self.records: dict[str, Manifest] = {}
        self._found: dict[tuple[int, str, int], Seen] = {}
        """(life, node, incarnation) -> what its disk had when its launcher looked."""
        self._named: set[str] = set()
        """CHECKPOINT/FILE of all that a manifest names."""
        self._tokens = 0

    # ---- the disks

    def at(self, location: str) -> MemoryPlace:
        return self.places.setdefault(location, MemoryPlace(location, self))

    def lose(self, node: str) -> None:
        self.places[f"/{node}"] = MemoryPlace(f"/{node}", self)

    def damage(self, node: str, which: int) -> bool:
        """A bit of one of the files on this disk flips."""
        place = self.at(f"/{node}")
        return place.damage(which)

    def publish(self, name: str, manifest: Manifest, files: Iterable[str]) -> None:
        """It is about to become visible. What its manifest does not name nobody finds: its writer was lost before."""
        if self.records.setdefault(name, manifest) != manifest:
            raise Violation(f"{name} is replaced by another one")
        self._named |= {f"{name}/{file}" for file in files}

    # ---- the truth

    def seen(self, node: str) -> Seen:
        place = self.at(f"/{node}")
        return self._seen(place, place.good(), with_unchecked=True)

    def _seen(self, place: MemoryPlace, good: list[str], *, with_unchecked: bool) -> Seen:
        copies: dict[str, frozenset[int]] = {}
        manifests = frozenset(path.partition("/")[0] for path in good if path.endswith("/" + MANIFEST))
        for path in self._named.intersection(place.files):
            name, _, file = path.partition("/")
            if path not in good and not (with_unchecked and name not in manifests):
                continue
            held = frozenset([LOOP]) if "-loop-" in file else self.contents.get(path, frozenset())
            copies[name] = copies.get(name, frozenset()) | held
        return Seen(manifests=manifests, copies=copies)

    def newest_anywhere(self) -> str:
        """Of all disks that there are; not of what was damaged before anybody had read it back."""
        disks = (self._seen(place, place.once_good(), with_unchecked=False) for place in self.places.values())
        return newest_whole(disks, self.shards)

    def newest_good(self, node: str) -> str | None:
        """Of the disks of nodes that are here, this one among them."""
        world = self._world
        here = {
            node,
            *(agent.name for agent in world.living_agents()),
            *(each.agent.name for each in world.lives.waiting),
        }
        return newest_whole((self.seen(name) for name in sorted(here)), self.shards) or None

    @property
    def nodes(self) -> list[str]:
        return [at.removeprefix("/") for at in self.places]

    # ---- what launchers ask

    def options(self, node: str) -> CheckpointOptions:
        every = self._world.schedule.checkpoint_every
        return CheckpointOptions(place=f"/{node}", layout=LOCAL, keep=KEEP, every_steps=every).started_from()

    def newest_step(self, node: str) -> int | None:
        return launcher_checkpoints.newest_step(self._run_options(node))

    def _run_options(self, node: str) -> RunOptions:
        script = Script.of("train.py", ())
        return RunOptions(job="job", script=script, target="train.py", checkpoints=self.options(node)).in_a_later_life()

    def with_start(self, life: Life, node: str, incarnation: int, least: str) -> Life:
        """As `starting` asks for it."""
        found = launcher_checkpoints.find_start(self._run_options(node), life.number)
        self._found[life.number, node, incarnation] = self.seen(node)
        return replace(life, resume=found.resume, start=found.sentence, offers=found.offers, named=found.named)

    def begin(self, life: Life, roster: Roster) -> Manifest | None:
        """A life goes on as its roster says: from the newest that is whole on the disks of its nodes, or why not."""
        number, taken = life.number, roster.resume.name if roster.resume is not None else ""
        disks = [self._found[number, record.name, record.incarnation] for record in roster.nodes]
        proven = newest_whole((disk.proven() for disk in disks), self.shards) if life.barren else ""
        newest = proven or newest_whole(disks, self.shards)
        if taken != newest:
            raise Violation(f"life {number} goes on from {taken or 'nothing'}, and the newest whole is {newest!r}")
        named = {name for disk in disks for name in disk.manifests if when(name) > when(newest)}
        unsaid = sorted(name for name in named if name not in roster.start)
        if unsaid:
            raise Violation(f"life {number} goes on from {taken or 'nothing'}, and nobody says why not from {unsaid}")
        if not taken:
            raise Violation(f"life {number} begins anew, and the first one wrote checkpoints")
        return self.records[taken]

    def check_end(self, agent: AgentProcess, end: End) -> None:
        """Who says that disks are lacking has seen none that are enough."""
        if LACKING not in end.sentence:
            return
        present = agent.core.cluster.peers.present()
        found = [self._found.get((agent.life.number, each.name, each.incarnation)) for each in present]
        if newest := newest_whole((disk for disk in found if disk is not None), self.shards):
            raise Violation(
                f"{newest} is whole on the disks of all that {agent.name} sees, and it ends: {end.sentence}"
            )

    # ---- what members read

    def trouble(self, process: MemberProcess, resume: Resume) -> Exception | None:
        """Read all of it, as `StoredInitial` does; what it would raise."""
        reader = node_disks.Reader(
            member=process.id, node=process.node, scope=process.life.scope, secret=None, source=f"/{process.node}"
        )
        try:
            checkpoint = reading.Checkpoint.open(node_disks.places_of(resume, reader), resume.name)
            texts = [checkpoint._first_good(reading._shard(each), _text) for each in checkpoint.manifest.shards]
            loop, _ = checkpoint.read_attachment(LOOP_STATE)
        except CheckpointError as error:
            return _error(resume, error)
        there = self.records[resume.name]
        if (tuple(map(int, texts)), loop) != (there.states, there.loop):
            raise Violation(f"{process.id} reads {texts}, {loop} from {resume}, which is {there}")
        return None

    def is_waited_for(self, resume: Resume) -> bool:
        """The agent of one of the disks stands still: whoever asks it waits."""
        agents = [self._world.agents.get(disk.node) for disk in resume.disks]
        return any(agent is not None and agent.alive and not agent.runs for agent in agents)

    # ---- production in the world's time

    @contextmanager
    def opened(self) -> Iterator[None]:
        clock = SimpleNamespace(time=self._world.clock.monotonic, monotonic=self._world.clock.monotonic)
        with ExitStack() as stack:
            for module in (launcher_checkpoints, durable_disk, node_disks):
                stack.enter_context(patch.object(module, "place_at", self.at))
            for module in (retention, durable):
                stack.enter_context(patch.object(module, "time", clock))
            stack.enter_context(patch.object(durable, "hyper_of", lambda loop: []))
            stack.enter_context(patch.object(reading, "_in_threads", lambda tasks: (task() for task in tasks)))
            stack.enter_context(patch.object(writing, "secrets", SimpleNamespace(token_hex=self._token)))
            stack.enter_context(patch.object(node_disks, "WayTo", lambda disk, reader: _Way(self._world, disk, reader)))
            yield

    def _token(self, size_bytes: int) -> str:
        self._tokens += 1
        return f"{self._tokens:0{2 * size_bytes}x}"


class _Way:
    """`WayTo`: the other node's agent answers at once, or cannot be reached."""

    def __init__(self, world: World, disk: NodeDisk, reader: node_disks.Reader) -> None:
        self._world, self._disk, self._reader = world, disk, reader

    def ask(self, request: DiskRequest, into: memoryview | None = None) -> bytes:
        agent = self._world.agents.get(self._disk.node)
        is_there = agent is not None and agent.alive and agent.core.cluster.peers.record.signature == self._disk.door
        if not is_there or not self._world.network.reach_each_other(self._reader.node, self._disk.node):
            raise CheckpointError(f"the disk of {self._disk.node} cannot be read from here: nobody answers")
        place: Any = self._world.disk.at(f"/{self._disk.node}")  # type: ignore[union-attr]  # where disks are local
        well, body = ServedDisk(place).answer(request)
        if not well:
            raise CheckpointError(body.decode())
        if into is not None:
            into[:] = body
        return bytes(body)


def _text(item: Any, part: Part, source: Source) -> str:
    meta, _ = tensor_sections.read(source, part, item.what)
    return meta.decode()
