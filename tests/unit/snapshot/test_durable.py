"""A checkpoint in a folder: what is written is read back, and every damage is noticed and named."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, OtherFormatError, TakenError
from elastrain.snapshot.durable.manifest import LOOP, MANIFEST, name_of, place_in_time
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.publishing import publish, visible
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.retention import choose, thorough
from elastrain.snapshot.durable.state_file import FRAME_BYTES
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.shard_state import ShardState
from tests.support.checkpoints import manifest, save, state, write_as_a_later_version


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "checkpoints")


def test_what_is_written_is_read_back(place: LocalPlace) -> None:
    made = save(place, 10)
    found = Checkpoint.open([place], made.name)
    assert found.manifest == made
    assert [s.digest() for s in found.read_shards(range(2))] == [state(index, 10).digest() for index in range(2)]
    text, tensors = found.read_attachment(LOOP)
    assert (text, tensors[0].tolist()) == ('{"hyper": []}', [0, 1, 2, 3, 4])
    assert found.look() == found.verify() == []


def test_who_reads_while_the_process_ends_is_told_so(place: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads back what was written may still be at it when the script has ended."""
    found = Checkpoint.open([place], save(place, 10).name)
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    with pytest.raises(CheckpointError, match="this process ends"):
        found.verify()


def test_what_has_no_manifest_is_not_seen(place: LocalPlace) -> None:
    save(place, 10)
    writer = PartWriter(place, name_of(0, 20), writer="m0")
    writer.write(state(0, 20))
    writer.finish()
    assert visible(place) == [name_of(0, 10)]
    assert choose([place]).checkpoint is not None


def test_nothing_is_overwritten_and_checkpoints_become_visible_in_rising_order(place: LocalPlace) -> None:
    made = save(place, 10)
    with pytest.raises(TakenError, match="nothing is overwritten"):
        publish(place, made)
    with pytest.raises(TakenError, match="older than"):
        save(place, 5)


def test_a_later_life_is_newer_whatever_its_step() -> None:
    names = [name_of(0, -1), name_of(0, 900), name_of(1, 20), name_of(10000, 3)]
    assert sorted(names, key=lambda n: place_in_time(n) or ()) == names
    assert [place_in_time(name) for name in ("life-0-step-1", "notes", f"{names[1]}~")] == [None] * 3


@pytest.mark.parametrize("seed", range(3))
def test_every_flipped_byte_is_noticed_and_the_older_checkpoint_is_chosen(place: LocalPlace, seed: int) -> None:
    save(place, 10)
    newest = save(place, 20)
    chance = random.Random(seed)
    for file in place.names(newest.name):
        path = Path(place.location) / newest.name / file
        whole = path.read_bytes()
        for position in chance.sample(range(len(whole)), min(len(whole), 60)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            choice = choose([place], thorough)
            assert choice.checkpoint is not None, (file, position)
            assert choice.checkpoint.manifest.step == 10, (file, position)
            assert newest.name in choice.reasons[0]
        path.write_bytes(whole)
    assert choose([place], thorough).reasons == ()


def test_a_damaged_frame_is_named_with_file_and_shard(place: LocalPlace) -> None:
    made = save(place, 10)
    part = made.shards[1].parts[0]
    path = Path(place.location) / made.name / part.file
    data = bytearray(path.read_bytes())
    data[part.offset_bytes + 7] ^= 1
    path.write_bytes(data)
    found = Checkpoint.open([place], made.name)
    assert found.look() == []
    with pytest.raises(DamagedError, match=rf"frame 0 of shard 1 in {part.file} is damaged"):
        found.read_shard(1)
    assert len(found.verify()) == 1
    assert found.read_shard(0).version == 10


def test_truncated_and_removed_files_are_noticed_at_a_quick_look(place: LocalPlace) -> None:
    save(place, 10)
    made = save(place, 20)
    path = Path(place.location) / made.name / made.shards[0].parts[0].file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "cut short" in choose([place]).reasons[0]
    path.unlink()
    choice = choose([place])
    assert "shard 0" in choice.reasons[0]
    assert "missing" in choice.reasons[0]
    assert choice.checkpoint is not None
    assert choice.checkpoint.manifest.step == 10


def test_swapped_files_are_noticed(place: LocalPlace) -> None:
    made = save(place, 10)
    one, other = (Path(place.location) / made.name / shard.parts[0].file for shard in made.shards)
    moved = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(moved)
    assert Checkpoint.open([place], made.name).look()


def test_a_state_of_another_step_is_noticed_by_its_digest(place: LocalPlace) -> None:
    made = save(place, 10)
    writer = PartWriter(place, made.name, writer="other")
    wrong = writer.write(state(0, 9))
    writer.finish()
    shards = (msgspec.structs.replace(made.shards[0], parts=(wrong.part,)), made.shards[1])
    lying = Checkpoint(manifest=msgspec.structs.replace(made, shards=shards), places=(place,))
    with pytest.raises(DamagedError, match="another digest"):
        lying.read_shard(0)


def test_a_good_copy_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    places = [LocalPlace(tmp_path / "n0"), LocalPlace(tmp_path / "n1")]
    writers = [PartWriter(place, name_of(0, 10), writer=f"m{i}") for i, place in enumerate(places)]
    written = [[writer.write(state(shard, 10)) for writer in writers] for shard in range(2)]
    for writer in writers:
        writer.finish()
    made = manifest(10, written)
    for place in places:
        publish(place, made)
    assert Checkpoint.open(places[:1], made.name).lacking() == []
    path = tmp_path / "n0" / made.name / made.shards[0].parts[0].file
    path.write_bytes(b"\0" * path.stat().st_size)
    found = Checkpoint.open(places, made.name)
    assert found.read_shard(0).digest() == state(0, 10).digest()
    assert len(found.verify()) == 2
    assert found.verify(every_copy=False) == []
    assert choose(places, thorough).reasons == ()
    assert choose(places[:1], thorough).checkpoint is None


def test_another_format_version_is_refused_with_both_versions_and_not_passed_over(place: LocalPlace) -> None:
    save(place, 10)
    write_as_a_later_version(Path(place.location) / save(place, 20).name)
    with pytest.raises(OtherFormatError, match=r"format 7, and this elastrain reads format 1.* name an older"):
        choose([place])


def test_a_bit_that_flips_in_the_number_of_the_format_is_damage(place: LocalPlace) -> None:
    good, made = save(place, 10), save(place, 20)
    path = Path(place.location) / made.name / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":3', 1))
    chosen = choose([place]).checkpoint
    assert chosen is not None and chosen.manifest == good


def test_a_checkpoint_is_chosen_without_torch(place: LocalPlace) -> None:
    save(place, 10)
    code = (
        "import sys\nfrom elastrain.snapshot.durable import owner, retention\n"
        "from elastrain.snapshot.durable.retention import choose, thorough\n"
        "from elastrain.snapshot.durable.places.local import LocalPlace\n"
        "assert choose([LocalPlace(sys.argv[1])], thorough).checkpoint\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, place.location], timeout=180).returncode == 0


@pytest.mark.parametrize("numel", [1, 16_383, 16_384, 70_001, (4 << 20) // 4 + 7])
def test_states_of_any_size_are_read_back_with_what_packs_and_what_does_not(place: LocalPlace, numel: int) -> None:
    torch.manual_seed(numel)
    kept = {
        "m": torch.randn(numel),
        "v": torch.zeros(numel),
        "small": torch.arange(5),
        "h": torch.ones(numel).bfloat16(),
    }
    written_states = [
        ShardState(shard=index, version=1, parameters=torch.randn(numel), pieces=[dict(kept), {}]) for index in range(2)
    ]
    writer = PartWriter(place, name_of(0, 1), writer="m0")
    written = [[writer.write(each)] for each in written_states]
    writer.finish()
    made = manifest(1, written)
    publish(place, made)
    found = Checkpoint.open([place], made.name)
    assert [s.digest() for s in found.read_shards(range(2))] == [s.digest() for s in written_states]
    assert found.verify(digests=False) == []
    path = Path(place.location) / made.name / made.shards[0].parts[0].file
    whole = path.read_bytes()
    assert len(whole) == sum(copies[0].part.size_bytes for copies in written)
    chance = random.Random(numel)
    for _ in range(20):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert len(found.verify(digests=False)) == 1


def test_reading_one_large_piece_tells_how_far_it_is_and_counts_every_copy(tmp_path: Path) -> None:
    places = [LocalPlace(tmp_path / node) for node in ("a", "b")]
    parts = []
    for place in places:
        writer = PartWriter(place, name_of(0, 3), writer="m0")
        parts.append(writer.attach("loop", [torch.randn(3 * FRAME_BYTES // 4)]))
        writer.finish()
    for place in places:
        publish(place, manifest(3, (), parts))
    told: list[int] = []
    found = replace(Checkpoint.open(places, name_of(0, 3)), on_bytes=told.append)
    assert found.verify() == []
    assert told.count(FRAME_BYTES) == 2 * 3
    assert sum(told) == found.size_here_bytes == 2 * found.manifest.size_bytes
