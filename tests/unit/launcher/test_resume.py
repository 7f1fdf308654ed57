"""What a job starts from: chosen once, the same for all its workers; a changed job is refused or taken on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.resume import (
    OWN,
    SKIPPED,
    Resume,
    as_text,
    changes,
    changes_so_far,
    from_text,
    newer,
    refusal,
)
from elastrain.decisions.membership import spec_difference
from elastrain.errors import ConfigError
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.shared.job_values import End, Life, Log, PutRoster, Start
from elastrain.launcher.start.run_options import RunOptions, StartWish
from elastrain.launcher.start.start_checkpoint import find_start, newest_step
from elastrain.protocol.agent_messages import Failed
from elastrain.runtime.loop_state.own_checkpoint import OwnCheckpoint
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.retention import left_behind, lives_before
from tests.support import checkpoints
from tests.unit.launcher.test_core import Job, of

RESUME = Resume(place="/data", name="life-0001-step-0000000040", step=40, spec={"seed": 0, "model": "a", "backups": 1})
START = "the job goes on after step 40"


def resumed(resume: Resume = RESUME, **config: Any) -> Job:
    return Job(life=Life(resume=resume, start=START), **config)


def test_the_choice_is_in_the_roster_and_goes_to_every_worker_also_to_later_ones() -> None:
    job = resumed()
    assert of(PutRoster, job.done)[0].roster.resume == RESUME
    for member in ("m0", "m1", "m2"):
        job.hello(member, seed=0, model="a", backups=1)
    job.commit(41)
    job.die("m1")
    assert [start.resume for start in of(Start, job.done)] == [RESUME] * 4
    assert [log.say for log in of(Log, job.done) if log.event == "resume"] == [START]


def test_a_changed_spec_ends_the_job_with_both_values_before_anything_begins() -> None:
    job = resumed()
    done = job.hello("m0", seed=1, model="a", backups=1)
    (end,) = of(End, done)
    assert end.code == 1
    assert end.sentence.startswith("m0 is refused: its seed is 1, the checkpoint's is 0: start the job as it was")
    assert "--accept-changes" in end.sentence


def test_what_says_most_is_named_first_and_what_is_a_hash_last() -> None:
    spec = {
        "amsgrad of parameter group 0": False,
        "layers' switches and numbers": "a",
        "optimizer": "AdamW",
        "model": "b",
    }
    resume = replace(RESUME, spec={**spec, "gamma of scheduler 0": 1})
    names = [change.partition(" is ")[0] for change in changes(resume, {})]
    rest = ["its amsgrad of parameter group 0", "its gamma of scheduler 0"]
    assert names == ["its optimizer", *rest, "its layers' switches and numbers", "its model"]


def test_a_change_that_is_accepted_is_said_and_logged() -> None:
    job = resumed(replace(RESUME, accepts_changes=True))
    done = job.hello("m0", seed=1, model="b", backups=1)
    assert of(End, done) == []
    (log,) = [log for log in of(Log, done) if log.event == "changed"]
    assert log.say == "accepted: its seed is 1, the checkpoint's is 0; its model is b, the checkpoint's is a"
    assert log.fields["step"] == 40


def test_how_many_copies_there_are_may_change_freely() -> None:
    assert changes(RESUME, {"seed": 0, "model": "a", "backups": 2}) == ()
    assert refusal(RESUME, {"seed": 0, "model": "a", "backups": 2}) == ""


def test_what_later_members_get_from_the_others_is_compared_with_the_checkpoint_alone() -> None:
    rate = "lr of parameter group 0"
    resume = replace(RESUME, spec={"seed": 0, rate: 0.1})
    assert refusal(resume, {"seed": 0, rate: 0.2}).startswith(f"its {rate} is 0.2, the checkpoint's is 0.1: start")
    assert spec_difference({"seed": 0, rate: 0.1}, {"seed": 0, rate: 0.2}) == ""
    job = resumed(resume)
    for member, told in (("m0", 0.1), ("m1", 0.1), ("m2", 0.2)):  # scaled by the number of members, perhaps
        assert of(End, job.hello(member, **{"seed": 0, rate: told})) == []


def test_what_the_checkpoint_does_not_say_is_not_compared_and_what_is_missing_here_is() -> None:
    assert changes(RESUME, {"seed": 0, "model": "a", "backups": 1, "more": 5}) == ()
    assert changes(RESUME, {"seed": 0}) == ("its model is (unset), the checkpoint's is a",)


def test_a_script_that_raises_in_the_first_step_of_a_resumed_job_has_never_worked() -> None:
    job = resumed()
    for member in ("m0", "m1", "m2"):
        job.hello(member, seed=0, model="a", backups=1)
    failed = Failed(step=41, micro_batch=0, signature="KeyError: 'x'", traceback="")
    assert "before the first commit" in of(End, job.say("m1", failed))[0].sentence


def test_what_was_accepted_is_in_the_manifests_that_follow_after_what_was_accepted_before() -> None:
    before = replace(RESUME, changes=("one",))
    so_far = changes_so_far(before, {"seed": 1, "model": "a", "backups": 1})
    assert so_far == ("one", "its seed is 1, the checkpoint's is 0 (accepted when the job went on after step 40)")
    assert changes_so_far(None, {}) == ()


def test_it_travels_as_text() -> None:
    assert from_text(as_text(replace(RESUME, scale=2.0, changes=("one",)))) == replace(
        RESUME, scale=2.0, changes=("one",)
    )
    with pytest.raises(ValueError, match="truncated"):
        from_text("{")


def options(
    folder: Path | None, source: str = "auto", *, thorough: bool = False, job: str = "job", layout: str = "shared"
) -> RunOptions:
    wish = StartWish(source=source, is_thorough=thorough)
    script = Script.of("train.py", ())
    checkpoints = CheckpointOptions(place=str(folder), layout=layout) if folder is not None else None
    return RunOptions(job=job, script=script, target="train.py", checkpoints=checkpoints, resume=wish)


def damage(folder: Path) -> None:
    """One byte in the middle of a file with shards."""
    file = max((f for f in folder.iterdir() if f.name != "manifest.json"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if file.stat().st_size > 2000 else 100] ^= 1
    file.write_bytes(bytes(content))


def test_auto_takes_the_newest_and_says_so(tmp_path: Path) -> None:
    for step in (3, 7):
        checkpoints.save(place_at(str(tmp_path)), step)
    found = find_start(options(tmp_path))
    assert found.resume is not None and found.resume.step == 7
    assert found.resume.spec == {"seed": 0}
    assert found.sentence == f"the job goes on after step 7, from life-0000-step-0000000007 in {tmp_path}"


def test_auto_without_a_checkpoint_starts_anew_and_says_so(tmp_path: Path) -> None:
    assert find_start(options(None)).sentence == ""
    for folder in (tmp_path, tmp_path / "none"):
        found = find_start(options(folder))
        assert found.resume is None and "the job starts anew" in found.sentence


@pytest.mark.parametrize("layout", ["shared", "local"])
def test_none_begins_anew_and_not_beside_checkpoints_that_a_later_life_would_take_for_its_own(
    tmp_path: Path, layout: str
) -> None:
    """Those of an older run of the same job: they are of life 1, too, and of later steps."""
    anew = options(tmp_path, "none", layout=layout)
    assert find_start(anew).resume is None
    (tmp_path / "life-0001-step-0000000002").mkdir()
    assert find_start(anew).resume is None, "what an interrupted write has left is nobody's"
    checkpoints.save(place_at(str(tmp_path)), 3, life=1)
    with pytest.raises(ConfigError, match=r"holds checkpoints already, the newest of them life-0001-step-0000000003"):
        find_start(anew)
    assert find_start(options(None, "none")).resume is None


@pytest.mark.parametrize("layout", ["shared", "local"])
def test_a_newer_checkpoint_of_another_version_is_not_passed_over(tmp_path: Path, layout: str) -> None:
    """The steps since the older one would be lost, and the next checkpoints would have the newer one removed."""
    for step in (3, 7):
        made = checkpoints.save(place_at(str(tmp_path)), step)
    checkpoints.write_as_a_later_version(tmp_path / made.name)
    asked = options(tmp_path, layout=layout)
    if layout == "local" and asked.checkpoints is not None:
        asked = replace(asked, checkpoints=asked.checkpoints.started_from())
    with pytest.raises(ConfigError, match=r"--resume auto: .* has format 7, .* use the version that wrote it, or name"):
        find_start(asked)
    assert find_start(options(tmp_path, str(tmp_path / "life-0000-step-0000000003"))).resume is not None


def test_where_none_is_good_the_job_does_not_begin_anew_beside_them(tmp_path: Path) -> None:
    for step in (3, 7):
        checkpoints.save(place_at(str(tmp_path)), step)
        damage(tmp_path / f"life-0000-step-000000000{step}")
    for asked, life in ((options(tmp_path, thorough=True), 1), (options(tmp_path, thorough=True).in_a_later_life(), 2)):
        with pytest.raises(ConfigError, match=r"no checkpoint is good in .*0007 is passed over: .*3 is passed over"):
            find_start(asked, life)


def test_a_newer_one_that_is_damaged_is_passed_over_and_the_reason_is_said(tmp_path: Path) -> None:
    for step in (3, 7):
        checkpoints.save(place_at(str(tmp_path)), step)
    damage(tmp_path / "life-0000-step-0000000007")
    found = find_start(options(tmp_path, thorough=True))
    assert found.resume is not None and found.resume.step == 3
    assert "life-0000-step-0000000007 is passed over: " in found.sentence


def test_a_path_names_one_checkpoint_or_the_newest_of_a_directory(tmp_path: Path) -> None:
    for step in (3, 7):
        checkpoints.save(place_at(str(tmp_path)), step)
    one = find_start(options(None, str(tmp_path / "life-0000-step-0000000003"))).resume
    newest = find_start(options(None, str(tmp_path))).resume
    assert one is not None and one.step == 3
    assert newest is not None and newest.step == 7


def test_checkpoints_of_a_job_are_newer_than_all_that_lie_in_its_directory(tmp_path: Path) -> None:
    """Else none of them could become visible, and the next command would go on from what this one went back past."""

    def lifted(source: str = "auto", life: int = 1) -> int:
        resume = find_start(options(tmp_path, source), life).resume
        assert resume is not None
        return resume.lives_before

    place = place_at(str(tmp_path))
    checkpoints.save(place, 3, life=1)
    assert lifted() == 0, "it goes on in the same life"
    checkpoints.save(place, 7, life=1)
    assert lifted(str(tmp_path / "life-0001-step-0000000003")) == 1
    assert lifted(life=2) == 0, "a later life of the same command counts on by itself"
    checkpoints.save(place, 5, life=3)
    assert lifted() == 2
    assert lifted(life=2) == 2
    assert lifted(str(tmp_path / "life-0001-step-0000000007")) == 3
    damage(tmp_path / "life-0003-step-0000000005")
    assert (
        find_start(options(tmp_path, thorough=True)).resume
        == find_start(options(tmp_path, str(tmp_path / "life-0001-step-0000000007"))).resume
    )


@pytest.mark.parametrize("layout", ["shared", "local"])
def test_who_went_back_on_purpose_does_not_come_to_what_it_has_left_behind(tmp_path: Path, layout: str) -> None:
    """Also where everything is lost before its own first checkpoint."""

    def newest(wish: RunOptions) -> tuple[str, int | None]:
        assert wish.checkpoints is not None
        found = find_start(replace(wish, checkpoints=wish.checkpoints.started_from()), 2)
        name = found.resume.name if found.resume is not None else found.offers[-1].name
        return name, newest_step(wish)

    place = place_at(str(tmp_path))
    for step in (3, 7):
        checkpoints.save(place, step, life=1)
    older = str(tmp_path / "life-0001-step-0000000003")
    back = options(tmp_path, older, job="another", layout=layout)
    assert newest(back) == ("life-0001-step-0000000003", 3)
    assert newest(back.in_a_later_life()) == newest(back.in_a_later_life().in_a_later_life()) == newest(back)
    assert newest(options(tmp_path, job="another", layout=layout)) == ("life-0001-step-0000000007", 7)
    mine = options(tmp_path, older, job="job", layout=layout).in_a_later_life()
    assert newest(mine) == ("life-0001-step-0000000007", 7), "its own are never left behind"


@pytest.mark.parametrize(
    ("there", "name", "life", "expected"),
    [
        ([], "life-0001-step-0000000003", 1, 0),
        (["life-0003-step-0000000005"], "life-0003-step-0000000005", 1, 2),  # it goes on in that one's life
        (["life-0003-step-0000000005"], "life-0003-step-0000000005", 2, 2),
        (["life-0003-step-0000000005"], "life-0001-step-0000000009", 1, 3),
        (["life-0001-step-0000000005"], "life-0001-step-0000000005", 4, 0),
    ],
)
def test_lives_are_lifted_above_all_that_lie_there(there: list[str], name: str, life: int, expected: int) -> None:
    assert lives_before(there, name, life) == expected


def test_what_others_wrote_after_the_one_that_was_named_is_left_behind() -> None:
    there = [f"life-0001-step-000000000{step}" for step in (3, 5, 7)]
    mine = there[2:].__contains__
    assert left_behind(there, there[0], lambda name: False) == there[1:]
    assert left_behind(there, there[0], mine) == there[1:2]
    assert left_behind(there, "", mine) == left_behind(there, "elsewhere", mine) == []


def test_what_is_left_behind_is_said(tmp_path: Path) -> None:
    for step in (3, 7):
        checkpoints.save(place_at(str(tmp_path)), step, life=1)
    older = str(tmp_path / "life-0001-step-0000000003")
    said = "; life-0001-step-0000000007 is left behind: what this job writes counts as newer"
    assert find_start(options(tmp_path, older, job="another")).sentence.endswith(said)
    assert said not in find_start(options(None, older)).sentence
    assert said not in find_start(options(tmp_path, str(tmp_path), job="another")).sentence


def test_a_named_one_that_is_damaged_or_not_there_is_refused(tmp_path: Path) -> None:
    checkpoints.save(place_at(str(tmp_path)), 3)
    folder = tmp_path / "life-0000-step-0000000003"
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_start(options(None, str(tmp_path / "elsewhere")))
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        find_start(options(None, str(folder.parent.parent)))
    with pytest.raises(ConfigError, match="there is no such folder"):
        find_start(options(None, ""))
    with pytest.raises(ConfigError, match=r"--resume .*step-0000000009"):
        find_start(options(None, str(tmp_path / "life-0000-step-0000000009")))
    damage(folder)
    with pytest.raises(ConfigError, match="name an older one, or say --resume auto"):
        find_start(options(None, str(folder)))


def test_a_later_life_takes_the_newest_that_is_whole_whatever_the_first_was_to_start_from(tmp_path: Path) -> None:
    later = options(tmp_path, "none").in_a_later_life().resume
    assert later == StartWish(source="auto", is_thorough=True)


@pytest.mark.parametrize(
    ("counts", "of_script"), [(None, False), ((3, 2), False), ((3, 3), False), ((3, 4), True), ((0, 1), True)]
)
def test_of_checkpoint_and_loaded_state_the_one_with_more_steps_counts(
    counts: tuple[int, int] | None, of_script: bool
) -> None:
    is_newer, sentence = newer(counts, 41)
    assert is_newer is of_script
    assert sentence.startswith(f"step 41 begins from the {'optimizer state' if of_script else 'job'}")
    assert counts is None or (f" {counts[0]}" in sentence and f" {counts[1]}" in sentence)


@pytest.mark.parametrize(
    ("made", "resume", "is_newer", "behind"),
    [
        (0, None, False, 0),
        (6, None, True, 6),
        (0, RESUME, False, 0),
        (41, RESUME, False, 0),
        (42, RESUME, True, 1),
        (0, replace(RESUME, spec={OWN: 7}), False, 7),
        (48, replace(RESUME, spec={OWN: 7}), False, 7),
        (49, replace(RESUME, spec={OWN: 7}), True, 8),
        (5, replace(RESUME, step=-1, spec={}), True, 5),
        (0, replace(RESUME, spec={SKIPPED: 7}), False, 7),
    ],
)
def test_of_two_checkpoints_the_one_with_more_steps_is_taken_and_no_step_counts_twice(
    made: int, resume: Resume | None, is_newer: bool, behind: int
) -> None:
    own, first = OwnCheckpoint(made, resume), 0 if resume is None else resume.step + 1
    assert (own.is_newer, own.behind) == (is_newer, behind)
    assert own.behind + first == max(own.counts), "the library goes on with the step behind the newer checkpoint"
    with pytest.raises(ConfigError, match="name a checkpoint that all members find"):
        own.load_state_dict({"behind": behind + 1})


def test_where_a_library_begins_may_change_and_all_members_begin_there() -> None:
    now = {"seed": 0, "model": "a", "backups": 1}
    assert changes(replace(RESUME, spec={**now, OWN: 7, SKIPPED: 7}), {**now, OWN: 8, SKIPPED: 8}) == ()
    refused = changes(replace(RESUME, spec={**now, SKIPPED: 7}), {**now, SKIPPED: 8})
    assert len(refused) == 1, "a script that leaves out samples by itself would leave them out twice"
    assert "that all members find" in spec_difference({**now, OWN: 7}, {**now, OWN: 8})
