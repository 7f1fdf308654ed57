"""Nodes with disks of their own, of which some are gone: the newest checkpoint that the others have whole is found."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from elastrain.base.resume import NodeDisk, Resume
from elastrain.launcher.shared.checkpoint_inventory import DiskOffer, join
from elastrain.snapshot.durable.manifest import name_of


@dataclass(frozen=True, kw_only=True)
class Written:
    """A checkpoint as its job left it: interrupted perhaps, so that some disks lack a part, or the manifest."""

    life: int
    step: int
    shards: tuple[frozenset[int], ...]
    """For each, the nodes that have a copy of it."""
    manifests: frozenset[int]
    """The nodes that have it."""
    damaged: frozenset[tuple[int, int]]
    """(shard, node): copies that turned out to be damaged there."""

    @property
    def name(self) -> str:
        return name_of(self.life, self.step)

    def offer(self, node: int) -> DiskOffer:
        good = {shard for shard, nodes in enumerate(self.shards) if node in nodes and (shard, node) not in self.damaged}
        files = tuple(_file(shard, node) for shard in sorted(good))
        if node not in self.manifests:
            return DiskOffer(name=self.name, files=files)
        needs = tuple(tuple(_file(shard, each) for each in sorted(nodes)) for shard, nodes in enumerate(self.shards))
        resume = Resume(place=f"/{node}", name=self.name, step=self.step, lives_before=self.life)
        return DiskOffer(name=self.name, files=files, content="x", needs=needs, resume=resume)

    def is_whole(self, here: frozenset[int]) -> bool:
        copies = [{(shard, node) for node in nodes & here} for shard, nodes in enumerate(self.shards)]
        return bool(self.manifests & here) and all(each - self.damaged for each in copies)


def _file(shard: int, node: int) -> str:
    return f"part-m{node}-{shard}"


NODES = st.sets(st.integers(0, 3), min_size=1)


@st.composite
def checkpoints(draw: st.DrawFn) -> list[Written]:
    when = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), unique=True, min_size=1, max_size=4))
    copies = st.tuples(st.integers(0, 2), st.integers(0, 3))
    return [
        Written(
            life=life,
            step=step,
            shards=tuple(frozenset(draw(NODES)) for _ in range(3)),
            manifests=frozenset(draw(NODES)),
            damaged=draw(st.frozensets(copies, max_size=2)),
        )
        for life, step in when
    ]


@given(written=checkpoints(), here=NODES.map(frozenset))
def test_the_newest_that_is_whole_on_the_disks_that_are_there_is_taken(
    written: list[Written], here: frozenset[int]
) -> None:
    offered = [
        (NodeDisk(node=f"n{node}", door="", endpoint=""), [each.offer(node) for each in written])
        for node in sorted(here)
    ]
    whole = [each for each in written if each.is_whole(here)]
    seen = [each for each in written if each.manifests & here]
    found = join(offered)
    if not whole:
        assert found.resume is None
        assert len(found.reasons) == len(seen)
        assert bool(found.lacking) == bool(seen), "beside what is not whole nothing begins anew"
        return
    newest = max(whole, key=lambda each: (each.life, each.step))
    newer = [each for each in seen if (each.life, each.step) > (newest.life, newest.step)]
    assert found.resume is not None
    assert found.resume.name == newest.name
    assert len(found.reasons) == len(newer)
    # What the job writes is newer than all that was passed over.
    assert found.resume.lives_before >= max((each.life for each in newer), default=newest.life)
