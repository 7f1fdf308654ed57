"""A place belongs to one job at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from elastrain.snapshot.durable.errors import DamagedError, TakenError
from elastrain.snapshot.durable.owner import OWNER, Owner, claim, owner_of
from elastrain.snapshot.durable.places.local import LocalHold, LocalPlace, SystemFiles
from elastrain.snapshot.durable.publishing import put
from tests.support.checkpoints import save


@pytest.fixture
def place(tmp_path: Path) -> LocalPlace:
    return LocalPlace(tmp_path / "checkpoints")


def test_all_processes_of_one_job_share_a_place(place: LocalPlace) -> None:
    one, other = claim(place, "a"), claim(place, "a")
    one.check()
    other.check()


def test_another_job_is_refused_with_both_names(place: LocalPlace) -> None:
    claim(place, "a").release()
    save(place, 10)
    with pytest.raises(TakenError, match="checkpoints of job a, and this is job b"):
        claim(place, "b")


def test_a_dead_job_without_a_checkpoint_leaves_the_place_to_the_next(place: LocalPlace) -> None:
    held = claim(place, "a")
    with pytest.raises(TakenError, match="in use by job a, which is alive"):
        claim(place, "b")
    held.release()
    claim(place, "b").check()


def test_a_part_of_a_checkpoint_without_an_owner_leaves_the_place_to_the_next(place: LocalPlace) -> None:
    """So it stands while one process of a job takes over what a job left that was killed in its first checkpoint."""
    put(place, "life-0001-step-0000000000/part-m0", b"all that there is of it")
    claim(place, "b").check()


def test_checkpoints_without_an_owner_are_not_written_beside(place: LocalPlace) -> None:
    save(place, 10)
    with pytest.raises(TakenError, match="holds checkpoints already"):
        claim(place, "a")
    claim(place, "a", take_over=True).check()


def test_a_living_job_keeps_its_place_and_a_dead_one_loses_it(place: LocalPlace) -> None:
    code = (
        "import sys\nfrom elastrain.snapshot.durable.owner import claim\n"
        "from elastrain.snapshot.durable.places.local import LocalPlace\n"
        "held = claim(LocalPlace(sys.argv[1]), 'a')\nprint('held', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, place.location], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(TakenError, match="in use by job a, which is alive"):
            claim(place, "b", take_over=True)
        process.kill()
    claim(place, "b", take_over=True).check()


class BeingTakenOver(LocalPlace):
    """Another process of the same job has its hands on the place until this one was kept out `times` times."""

    def __init__(self, place: LocalPlace, times: int, then: Callable[[], None]) -> None:
        super().__init__(place.location)
        self._left, self._then = times, then

    def hold(self, name: str, *, alone: bool) -> LocalHold:
        try:
            return super().hold(name, alone=alone)
        except TakenError:
            self._left -= 1
            if not self._left:
                self._then()
            raise


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_who_takes_the_place_over_for_the_same_job_is_waited_for(place: LocalPlace, times: int) -> None:
    claim(place, "a").release()
    save(place, 10)
    taking = place.hold(OWNER, alone=True)

    def take() -> None:
        place.remove(OWNER)
        put(place, OWNER, msgspec.json.encode(Owner(job="b", claim="by another")))
        taking.release()

    claim(BeingTakenOver(place, times, take), "b", take_over=True).check()
    assert owner_of(place) == Owner(job="b", claim="by another")


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_who_only_looks_whether_the_owner_lives_does_not_pass_for_it(place: LocalPlace, times: int) -> None:
    claim(place, "a").release()
    save(place, 10)
    looking = place.hold(OWNER, alone=True)
    claim(BeingTakenOver(place, times, looking.release), "b", take_over=True).check()


def test_who_has_lost_the_place_makes_nothing_visible(place: LocalPlace) -> None:
    held = claim(place, "a")
    held.release()  # as where a medium has no locks
    claim(place, "b", take_over=True)
    with pytest.raises(TakenError, match="belongs to job b now: job a writes no more"):
        held.check()


def test_a_damaged_owner_is_nobody(place: LocalPlace) -> None:
    claim(place, "a")
    (Path(place.location) / OWNER).write_bytes(b'{"format":1,"job":7}')
    with pytest.raises(DamagedError, match=r"owner.json is damaged"):
        owner_of(place)


def test_of_many_that_claim_at_once_one_job_wins(place: LocalPlace) -> None:
    code = (
        "import sys\nfrom elastrain.snapshot.durable.errors import TakenError\n"
        "from elastrain.snapshot.durable.owner import claim\n"
        "from elastrain.snapshot.durable.places.local import LocalPlace\n"
        "sys.stdin.readline()\n"
        "try:\n    held = claim(LocalPlace(sys.argv[1]), sys.argv[2])\n"
        "except TakenError:\n    print('no', flush=True)\n"
        "else:\n    print('yes', flush=True)\nsys.stdin.read()"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, place.location, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for job in "aabbcc"
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate()
    winners = {job for job, answer in zip("aabbcc", answers, strict=True) if answer == "yes"}
    owner = owner_of(place)
    assert owner is not None
    assert winners == {owner.job}
    assert answers.count("yes") == 2


class NetworkFiles(SystemFiles):
    """NFS makes locks of byte ranges out of `flock`: a lock that keeps others out asks for a file open for writing."""

    def lock(self, fd: int, *, alone: bool) -> None:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_RDONLY if alone else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        super().lock(fd, alone=alone)


def test_a_place_on_nfs_changes_hands(tmp_path: Path) -> None:
    place = LocalPlace(str(tmp_path), NetworkFiles())
    claim(place, "a").release()
    save(place, 10)
    claim(place, "b", take_over=True).check()
