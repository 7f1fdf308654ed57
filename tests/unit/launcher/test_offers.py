"""Which checkpoint nodes with disks of their own start from, by what each has of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.resume import NodeDisk, Resume
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.shared.checkpoint_inventory import DiskOffer, join
from elastrain.launcher.shared.job_values import End, Life, PutRoster, Start
from elastrain.launcher.start.run_options import RunOptions, StartWish
from elastrain.launcher.start.start_checkpoint import find_start
from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.retention import remove
from tests.support.checkpoints import save_on_disks
from tests.unit.launcher.test_core import Job, of


def disk(node: str) -> NodeDisk:
    return NodeDisk(node=node, door=f"agent of {node}, start 0", endpoint="127.0.0.1:1")


def offer(
    step: int, *files: str, needs: tuple[tuple[str, ...], ...] = (("a", "b"), ("b", "c")), content: str = "x"
) -> DiskOffer:
    name = name_of(1, step)
    return DiskOffer(
        name=name, files=files, content=content, needs=needs, resume=Resume(place="", name=name, step=step)
    )


def test_disks_that_have_all_parts_together_are_enough() -> None:
    found = join([(disk("n0"), [offer(3, "a")]), (disk("n1"), [offer(3, "c")]), (disk("n2"), [])])
    assert found.resume is not None
    assert found.resume.step == 3
    assert [each.node for each in found.resume.disks] == ["n0", "n1"]
    assert str(found.resume) == f"{name_of(1, 3)} in the disks of n0, n1"


def test_a_newer_one_that_lacks_a_part_is_passed_over_with_the_reason() -> None:
    found = join([(disk("n0"), [offer(3, "b"), offer(5, "a")])])
    assert found.resume is not None and found.resume.step == 3
    assert found.reasons == (f"{name_of(1, 5)} is passed over: no disk that is here has a good copy of b or c",)
    assert found.lacking == ""


def test_lives_are_counted_on_from_the_highest_that_any_disk_has() -> None:
    def having(step: int, *files: str, lives: int) -> DiskOffer:
        made = offer(step, *files)
        assert made.resume is not None
        return replace(made, resume=replace(made.resume, lives_before=lives))

    second = (disk("n1"), [having(3, "b", lives=2)])
    found = join([(disk("n0"), [having(3, "a", lives=1)]), second])
    assert found.resume is not None and found.resume.lives_before == 2
    found = join([(disk("n0"), [having(5, "a", lives=4)]), second])
    assert found.resume is not None and found.resume.step == 3
    assert found.resume.lives_before == 4, "that of a newer one, which is passed over"


def test_where_nothing_is_complete_the_job_may_not_begin_anew() -> None:
    assert "no disk that is here has a good copy of b or c" in join([(disk("n0"), [offer(5, "a")])]).lacking
    assert join([(disk("n0"), [])]).lacking == ""


def test_parts_without_a_manifest_count_with_the_manifest_of_another_node() -> None:
    parts = DiskOffer(name=name_of(1, 3), files=("c",))
    found = join([(disk("n0"), [offer(3, "a")]), (disk("n1"), [parts])])
    assert found.resume is not None
    assert join([(disk("n1"), [parts])]).resume is None


def test_after_a_life_that_came_no_further_copies_that_nobody_could_check_do_not_count() -> None:
    unchecked = DiskOffer(name=name_of(1, 5), files=("c",))
    offered = [(disk("n0"), [offer(3, "b"), offer(5, "a")]), (disk("n1"), [unchecked])]
    first, second = join(offered).resume, join(offered, is_wary=True)
    assert first is not None and first.step == 5
    assert second.resume is not None and second.resume.step == 3
    assert second.reasons == (f"{name_of(1, 5)} is passed over: no disk that is here has a good copy of b or c",)
    alone = join([(disk("n0"), [offer(5, "a")]), (disk("n1"), [unchecked])], is_wary=True).resume
    assert alone is not None and alone.step == 5, "there is no older one"


def test_a_later_life_does_not_begin_anew_where_no_disk_has_anything(tmp_path: Path) -> None:
    assert find_start(options(tmp_path)).named == ""
    later = find_start(options(tmp_path, thorough=True), 2)
    (end,) = of(End, Job(life=Life(number=2, step=3, named=later.named)).done)
    assert "no node here has a checkpoint of this job: start the nodes that have it" in end.sentence


def test_a_checkpoint_of_the_same_name_and_another_content_does_not_count() -> None:
    found = join([(disk("n0"), [offer(3, "a", content="x")]), (disk("n1"), [offer(3, "b", "c", content="y")])])
    assert found.resume is not None
    assert [each.node for each in found.resume.disks] == ["n1"]


def options(folder: Path, source: str = "auto", *, thorough: bool = False) -> RunOptions:
    checkpoints = CheckpointOptions(place=str(folder), layout="local").started_from()
    wish = StartWish(source=source, is_thorough=thorough)
    script = Script.of("train.py", ())
    return RunOptions(job="job", script=script, target="train.py", checkpoints=checkpoints, resume=wish)


def offered(tmp_path: Path, nodes: tuple[int, ...], **how: bool) -> list[tuple[NodeDisk, tuple[DiskOffer, ...]]]:
    return [(disk(f"n{n}"), find_start(options(tmp_path / f"n{n}", **how)).offers) for n in nodes]


def test_real_disks_offer_what_lies_on_them(tmp_path: Path) -> None:
    for step in (3, 7):
        save_on_disks([LocalPlace(tmp_path / f"n{n}") for n in range(3)], step)
    for nodes in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        found = join(offered(tmp_path, nodes)).resume
        assert found is not None and found.step == 7
    assert "is passed over" in join(offered(tmp_path, (1,))).lacking
    remove(LocalPlace(tmp_path / "n1"), name_of(0, 7))
    found = join(offered(tmp_path, (0, 1))).resume
    assert found is not None and found.step == 3


def test_a_damaged_file_is_not_offered(tmp_path: Path) -> None:
    save_on_disks([LocalPlace(tmp_path / f"n{n}") for n in range(3)], 3)
    for n in (0, 1):
        file = next((tmp_path / f"n{n}" / name_of(0, 3)).glob("part-m?-*"))
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    assert join(offered(tmp_path, (0, 1, 2))).resume is not None  # looked at quickly
    assert join(offered(tmp_path, (0, 1, 2), thorough=True)).resume is None


def test_nothing_is_offered_but_what_the_job_is_to_start_from(tmp_path: Path) -> None:
    assert find_start(options(tmp_path, "none")).offers == ()
    save_on_disks([LocalPlace(tmp_path)], 3)
    assert len(find_start(options(tmp_path, f"/elsewhere/{name_of(0, 3)}")).offers) == 1
    assert find_start(options(tmp_path, f"/elsewhere/{name_of(0, 4)}")).offers == ()


def test_the_roster_has_what_all_offer_together_and_no_job_begins_with_less() -> None:
    job = Job(life=Life(offers=(offer(3, "a", "b"),)))
    resume = of(PutRoster, job.done)[0].roster.resume
    assert resume is not None and resume.step == 3
    assert all(start.resume == resume for start in of(Start, job.done))
    (end,) = of(End, Job(life=Life(offers=(offer(3, "a"),))).done)
    assert end.code == 1
    assert "no disk that is here has a good copy of b or c: start the nodes that have it" in end.sentence
    (end,) = of(End, Job(life=Life(named="/gone")).done)
    assert "no node here has /gone" in end.sentence


def test_the_roster_of_a_life_after_one_that_came_no_further_has_nothing_unchecked() -> None:
    unchecked = DiskOffer(name=name_of(1, 5), files=("c",))
    for barren, step in ((0, 5), (1, 3)):
        life = Life(number=3, barren=barren, offers=(offer(3, "b"), offer(5, "a"), unchecked))
        resume = of(PutRoster, Job(life=life).done)[0].roster.resume
        assert resume is not None and resume.step == step


def test_simulated_nodes_have_folders_of_their_own() -> None:
    local = CheckpointOptions(place="/d", layout="local").started_from("/old")
    assert local.on_node("node1") == replace(local, place="/d/node1", source="/old/node1")
    shared = CheckpointOptions(place="/d")
    assert shared.started_from("/old").on_node("node1") == shared
