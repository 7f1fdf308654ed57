"""A member claims the place of its checkpoints at once, or, from another job, with its first view."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.resume import Resume
from elastrain.errors import ConfigError
from elastrain.runtime.durable.disk import CheckpointDisk
from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.owner import claim, owner_of
from elastrain.snapshot.durable.places.local import LocalPlace
from tests.support.checkpoints import save


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    """With a checkpoint of a job that has ended."""
    place = LocalPlace(tmp_path)
    claim(place, "before").release()
    save(place, 10)
    return place


def disk(place: LocalPlace, job: str = "job") -> CheckpointDisk:
    return CheckpointDisk(CheckpointOptions(place=place.location, resumes=True), job, lambda *_, **__: None)


def owner(place: LocalPlace) -> str:
    found = owner_of(place)
    assert found is not None
    return found.job


def test_nothing_changes_hands_before_there_is_a_view(place: LocalPlace) -> None:
    refused, taken, second = disk(place, "refused"), disk(place), disk(place)
    for each in (refused, taken, second):
        each.open()
    refused.close()
    assert owner(place) == "before"
    for each in (taken, second):
        each.take_over()
        each.take_over()  # with each later view
        each.check()
    assert owner(place) == "job"


def test_of_two_jobs_that_go_on_from_one_place_the_second_is_refused(place: LocalPlace) -> None:
    one, other = disk(place, "one"), disk(place, "other")
    one.open()
    other.open()
    one.take_over()
    with pytest.raises(ConfigError, match="in use by job one, which is alive"):
        other.take_over()
    assert owner(place) == "one"


def test_a_checkpoint_of_the_same_step_that_another_job_has_written_is_not_taken_for_its_own(place: LocalPlace) -> None:
    found = disk(place, "job").find(name_of(0, 10))
    assert found is not None and found.step == 10
    assert disk(place, "other").find(name_of(0, 10)) is None


def of_another_disk(place: LocalPlace, resumed_job: str, **spec: object) -> CheckpointDisk:
    """Of a node whose disk has no part of the checkpoint that the job goes on from, which is of this spec."""
    options = CheckpointOptions(place=place.location, layout="local", resumed_job=resumed_job)
    resume = Resume(place="the disks", name=name_of(0, 20), step=20, spec={"seed": 0, **spec})
    return CheckpointDisk(options, "job", lambda *_, **__: None, resume)


def test_older_checkpoints_of_the_resumed_job_on_a_disk_without_the_newest_are_taken_over(place: LocalPlace) -> None:
    """Others had written the newest alone, while this node's worker was being replaced."""
    taken, second = of_another_disk(place, "before"), of_another_disk(place, "before")
    for each in (taken, second):
        each.open()
    assert owner(place) == "before"
    for each in (taken, second):
        each.take_over()
        each.check()
    assert owner(place) == "job"


@pytest.mark.parametrize("resumed_job", ["", "yet another"])
def test_checkpoints_of_a_job_that_is_not_resumed_are_not_written_beside(place: LocalPlace, resumed_job: str) -> None:
    with pytest.raises(ConfigError, match="holds checkpoints of job before, and this is job job"):
        of_another_disk(place, resumed_job, seed=1).open()
    assert owner(place) == "before"


def test_older_checkpoints_of_the_resumed_training_are_taken_over_whoever_had_the_disk_since(place: LocalPlace) -> None:
    """A job in between was killed before its first checkpoint; or it went on without this node."""
    claim(place, "in between", take_over=True).release()
    taken = of_another_disk(place, "before", backups=2)
    taken.open()
    assert owner(place) == "in between"
    taken.take_over()
    assert owner(place) == "job"
