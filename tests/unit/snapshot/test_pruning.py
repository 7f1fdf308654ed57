"""Which checkpoints go, and why: decided over values."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.owner import OWNER
from elastrain.snapshot.durable.places.local import TEMPORARY, LocalPlace
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import mark_verified, put
from elastrain.snapshot.durable.retention import Kept, Removal, clear, kept, prune, remove
from tests.support.checkpoints import save


def entries(told: str) -> list[Kept]:
    """`10v 20 30-`: steps; `v` verified, `-` without a manifest. Committed at the second of the step."""
    return [
        Kept(
            name=name_of(0, int(word.rstrip("v-"))),
            is_visible=not word.endswith("-"),
            is_verified=word.endswith("v"),
            time_s=float(word.rstrip("v-")),
        )
        for word in told.split()
    ]


def steps(gone: Sequence[Removal]) -> list[int]:
    return [int(removal.name.rpartition("-")[2]) for removal in gone]


@pytest.mark.parametrize(
    ("told", "keep", "gone"),
    [
        ("10 20 30 40", 1, []),  # nothing was read back
        ("10 20 30 40v", 3, [10]),
        ("10 20 30 40v", 1, [10, 20, 30]),
        ("10v 20v 30 40", 1, [10]),  # the newest that was read back stays, with all that are newer
        ("10v 20 30 40", 1, []),
        ("10- 20v 30-", 3, [10]),  # what is newer may still be written
        ("10v 20- 30-", 1, []),
        ("40v 10 30 20", 2, [10, 20]),  # in whatever order they are found
    ],
)
def test_by_count(told: str, keep: int, gone: list[int]) -> None:
    assert steps(prune(entries(told), keep=keep, now_s=100.0)) == gone


def test_what_is_not_being_written_any_more_goes_whatever_was_read_back() -> None:
    told = [*entries("10 20-"), Kept(name=name_of(1, 5), is_visible=False, is_verified=False, time_s=0.0)]
    assert steps(prune(told, keep=3, now_s=0.0, over=(1, 4))) == [20]
    assert steps(prune(told, keep=3, now_s=0.0, over=(1, 5))) == [20, 5]
    assert prune(told, keep=3, now_s=0.0) == ()


def test_by_age() -> None:
    gone = prune(entries("10 50 90v"), keep=5, now_s=100.0, age_s=60.0)
    assert steps(gone) == [10]
    assert gone[0].reason == "it is older than 60 s"
    assert prune(entries("10 20v"), keep=5, now_s=1e9, age_s=60.0)[0].name == name_of(0, 10)


def test_a_later_life_is_newer() -> None:
    later = Kept(name=name_of(1, 5), is_visible=True, is_verified=True, time_s=0.0)
    assert steps(prune([*entries("10v 20v"), later], keep=1, now_s=0.0)) == [10, 20]


def test_at_least_one_is_kept() -> None:
    with pytest.raises(ValueError, match="at least one"):
        prune(entries("10v"), keep=0, now_s=0.0)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    made = save(place, 10)
    (tmp_path / made.name / "notes.txt").write_text("mine")
    (tmp_path / "life-0000-step-x").mkdir()
    assert [entry.name for entry in kept(place)] == [made.name]
    remove(place, made.name)
    assert place.names(made.name) == ["notes.txt"]
    assert kept(place)[0].is_visible is False


def test_what_is_too_old_goes_by_the_time_in_its_manifest_and_a_damaged_manifest_stays(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    for step in (10, 20, 30, 40):  # their times are 1010, 1020, …
        save(place, step)
    mark_verified(place, name_of(0, 40))
    manifest = tmp_path / name_of(0, 20) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    gone = prune(kept(place, with_times=True), keep=9, age_s=15.0, now_s=1050.0)
    assert [removal.name for removal in gone] == [name_of(0, 10), name_of(0, 30)]
    assert prune(kept(place), keep=9, age_s=15.0, now_s=1050.0) == (), "without times none is too old"


@pytest.mark.parametrize("owner", ["living", "killed"])
def test_what_a_killed_process_has_left_of_its_claim_goes_and_what_a_living_one_writes_stays(
    owner: str, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom elastrain.snapshot.durable.places.local import LocalPlace\n"
        "sink = LocalPlace(sys.argv[1]).create('owner.json')\nsink.write(memoryview(b'whose it is'))\n"
        "print('written', flush=True)\nsys.stdin.read()\nsink.commit()"
    )
    place = LocalPlace(tmp_path)
    (tmp_path / f"{TEMPORARY}notes").mkdir()  # somebody else's, and no file
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        if owner == "killed":
            process.kill()
            process.wait()
        clear(place, keep=1, age_s=None)
        process.communicate()
    assert place.names() == [f"{TEMPORARY}notes", *([OWNER] if owner == "living" else [])]
    assert process.returncode == (0 if owner == "living" else -9)


def test_an_empty_file_may_belong_to_a_process_that_is_about_to_lock_it(tmp_path: Path) -> None:
    (tmp_path / f"{TEMPORARY}owner.json-01234567").touch()
    clear(LocalPlace(tmp_path), keep=1, age_s=None)
    assert LocalPlace(tmp_path).names() == [f"{TEMPORARY}owner.json-01234567"]


def test_on_a_medium_without_locks_what_may_be_written_stays() -> None:
    pytest.importorskip("fsspec")
    place = place_at(f"memory://{secrets.token_hex(4)}/c")
    put(place, f"{TEMPORARY}owner.json-01234567", b"whose it is")
    clear(place, keep=1, age_s=None)
    assert place.names() == [f"{TEMPORARY}owner.json-01234567"]
