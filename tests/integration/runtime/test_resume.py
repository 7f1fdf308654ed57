"""A job goes on from a checkpoint, on any number of members and nodes, as if nothing had ever stopped."""

from __future__ import annotations

import functools
import random
import re
import shutil
from pathlib import Path

import pytest

from elastrain.snapshot.durable.conversion import import_files
from elastrain.snapshot.durable.owner import claim, owner_of
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.retention import candidates
from tests.support.checkpoints import save_on_disks
from tests.support.killing import killed, size_options
from tests.support.shared import once
from tests.support.training import SCRIPTS, Run, run_job

SCRIPT = SCRIPTS / "resumed_training.py"
STEPS = 7


def run(
    folder: Path,
    workers: int,
    *arguments: str,
    options: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
    steps: int = STEPS,
) -> Run:
    arguments = ("--steps", str(steps), *arguments)
    return run_job(folder, workers=workers, arguments=arguments, options=options, faults=faults, script=SCRIPT)


def last_words(done: Run) -> set[str]:
    """What each member that came to the end says of parameters, statistics, what is registered, and the schedule."""
    return set(re.findall(r"digest \w+ told \S+ lr \S+", done.output))


@functools.cache
def undisturbed() -> tuple[frozenset[str], Path]:
    """The last words of the job that wrote the checkpoints before its steps 2 and 4, and went on; the checkpoints."""

    def make(folder: Path) -> None:
        done = run(folder / "run", 1, "--save-at", "2", "4", "--folder", str(folder / "checkpoints"))
        assert done.exit_code == 0, done.output
        (folder / "said").write_text("\n".join(last_words(done)))

    folder = once("resume", make)
    return frozenset((folder / "said").read_text().splitlines()), folder / "checkpoints"


@pytest.mark.parametrize(
    ("workers", "nodes", "backups", "step"),
    [(1, 0, 0, 1), (3, 0, 1, 3), (1, 2, 1, 1), pytest.param(1, 3, 2, 3, marks=pytest.mark.on_demand),
     pytest.param(5, 0, 1, 3, marks=pytest.mark.on_demand)],
)  # fmt: skip
def test_it_goes_on_bit_for_bit_whoever_takes_part(
    workers: int, nodes: int, backups: int, step: int, tmp_path: Path
) -> None:
    whole, checkpoints = undisturbed()
    options = ["--resume", str(checkpoints / f"life-0001-step-{step:010d}")]
    options += ["--local-nodes", str(nodes)] if nodes else []
    done = run(tmp_path, workers, "--backups", str(backups), options=tuple(options))
    assert done.exit_code == 0, done.output
    assert done.output.count(f"the job goes on after step {step}") == 1
    assert last_words(done) == whole
    first = [min(e["step"] for e in events if e["event"] == "passed") for events in done.journals.values()]
    assert set(first) == {step + 1}


def test_members_that_are_lost_in_its_first_step_lose_nothing(tmp_path: Path) -> None:
    whole, checkpoints = undisturbed()
    options = ("--resume", str(checkpoints))
    done = run(
        tmp_path, 3, "--backups", "0", options=options, faults=("kill --target member:m1 --at step=4,phase=forward",)
    )
    assert done.exit_code == 0, done.output
    assert "m1" in done.output and "lost" in done.output
    assert last_words(done) == whole


def test_a_plain_state_dict_starts_a_job_as_if_the_script_had_loaded_it(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    assert run(tmp_path / "dump", 1, "--seed", "9", "--dump", str(other), steps=1).exit_code == 0
    import_files(place_at(str(tmp_path / "imported")), [other])
    loaded = run(tmp_path / "loaded", 1, "--load", str(other), steps=2)
    started = run(tmp_path / "started", 2, options=("--resume", str(tmp_path / "imported")), steps=2)
    assert started.exit_code == 0, started.output
    assert "the job starts with the parameters of" in started.output
    assert _digests(started) == _digests(loaded) != set()


def _digests(done: Run) -> set[str]:
    return set(done.digests.values())


def test_another_learning_rate_or_seed_is_refused_with_both_values_and_taken_on_purpose(tmp_path: Path) -> None:
    (whole, written), checkpoints = undisturbed(), tmp_path / "checkpoints"
    shutil.copytree(written, checkpoints)
    claim(place_at(str(checkpoints)), "before", take_over=True).release()
    before, options = owner_of(place_at(str(checkpoints))), ("--checkpoint-dir", str(checkpoints))
    refused = run(tmp_path / "a", 1, "--lr", "0.006", options=options)
    assert refused.exit_code == 1
    rate = "lr of parameter group 0 is 0.006, the checkpoint's is 0.003"
    assert f"its initial_{rate} (and 1 more differ)" in refused.output
    assert owner_of(place_at(str(checkpoints))) == before, "who is refused owns nothing"
    older = ("--resume", str(checkpoints / "life-0001-step-0000000001"), "--checkpoint-every", "1")
    taken = run(tmp_path / "b", 1, "--seed", "8", "--lr", "0.006", options=(*options, *older, "--accept-changes"))
    assert taken.exit_code == 0, taken.output
    assert f"its {rate}; its seed is 8, the checkpoint's is 7" in taken.output
    assert owner_of(place_at(str(checkpoints))) != before
    assert "life-0001-step-0000000003 is left behind" in taken.output
    newest = candidates([place_at(str(checkpoints))])[0]
    assert newest.startswith("life-0002-"), "the next one goes on from what was written, not from what was left behind"
    (first,), (after,) = ({float(told.rpartition(" ")[2]) for told in each} for each in (whole, last_words(taken)))
    assert after == pytest.approx(2 * first)


@pytest.mark.parametrize(
    ("seed", "sizes"),
    [
        (0, [(3, 0), (2, 0)]),
        pytest.param(1, [(2, 0), (1, 2), (1, 0)], marks=pytest.mark.on_demand),
        pytest.param(2, [(1, 3), (3, 0), (5, 0)], marks=pytest.mark.on_demand),
        pytest.param(3, [(5, 0), (1, 3), (1, 2)], marks=pytest.mark.on_demand),
    ],
)
def test_a_job_that_is_killed_whole_again_and_again_ends_as_if_nothing_had_happened(
    seed: int, sizes: list[tuple[int, int]], tmp_path: Path
) -> None:
    """On other numbers of members and nodes each time: `sizes` are (workers, nodes); the last comes to the end."""
    (whole, _), rng, checkpoints = undisturbed(), random.Random(seed), tmp_path / "checkpoints"
    *lost, (workers, nodes) = sizes
    script = (str(SCRIPT), "--steps", str(STEPS), "--slow", "0.3")
    for number, size in enumerate(lost):
        killed(tmp_path / f"killed{number}", checkpoints, size_options(*size), script, rng.uniform(0.0, 0.8))
    (tmp_path / "last").mkdir()
    options = ("--checkpoint-dir", str(checkpoints), *(("--local-nodes", str(nodes)) if nodes else ()))
    done = run(tmp_path / "last", workers, options=options)
    assert done.exit_code == 0, done.output
    assert done.output.count("the job goes on after step") == 1
    assert last_words(done) == whole


@pytest.mark.parametrize(
    ("gone", "nodes"),
    [
        (("node1",), 3),
        pytest.param((), 3, marks=pytest.mark.on_demand),
        pytest.param(("node0",), 3, marks=pytest.mark.on_demand),
        pytest.param(("node2",), 2, marks=pytest.mark.on_demand),
    ],
)
def test_a_job_on_local_disks_is_killed_whole_and_goes_on_without_one_of_them(
    gone: tuple[str, ...], nodes: int, tmp_path: Path
) -> None:
    (whole, _), disks = undisturbed(), tmp_path / "disks"
    local = ("--checkpoint-layout", "local")
    script = (str(SCRIPT), "--steps", str(STEPS), "--slow", "0.3")
    killed(tmp_path / "killed", disks, (*size_options(1, 3), *local), script, 0.3, seen_in="node1")
    for node in gone:
        shutil.rmtree(disks / node)
    (tmp_path / "last").mkdir()
    done = run(tmp_path / "last", 1, options=("--local-nodes", str(nodes), "--checkpoint-dir", str(disks), *local))
    assert done.exit_code == 0, done.output
    assert done.output.count("the job goes on after step") == 1
    assert last_words(done) == whole


def test_a_job_does_not_begin_anew_where_its_disks_lack_a_part(tmp_path: Path) -> None:
    disks = [tmp_path / f"node{number}" for number in range(3)]
    save_on_disks([LocalPlace(disk) for disk in disks], 3)
    for disk in disks[1:]:
        shutil.rmtree(disk)
    options = ("--local-nodes", "2", "--checkpoint-dir", str(tmp_path), "--checkpoint-layout", "local")
    done = run(tmp_path / "run", 1, options=options)
    assert done.exit_code == 1
    assert re.search(
        r"no disk that is here has a good copy of part-m1-\w+ or part-m2-\w+: start the nodes that have it", done.output
    )
    assert "digest" not in done.output


def _damage(checkpoint: Path) -> None:
    part = next(file for file in checkpoint.iterdir() if file.name.startswith("part"))
    content = bytearray(part.read_bytes())
    content[1000] ^= 1
    part.write_bytes(bytes(content))


def test_a_job_does_not_begin_anew_beside_checkpoints_whose_damage_only_readers_find(tmp_path: Path) -> None:
    """It ended with code 0, after the steps of a new job, and had pruned all that was there."""
    copy = tmp_path / "copy"
    shutil.copytree(undisturbed()[1], copy)
    there = sorted(each for each in copy.iterdir() if each.is_dir())
    for each in there:
        _damage(each)
    done = run(tmp_path, 1, options=("--checkpoint-dir", str(copy), "--checkpoint-every", "1", "--keep", "1"))
    assert done.exit_code == 2, done.output
    assert f"--resume auto: no checkpoint is good in {copy}" in done.output
    assert "digest" not in done.output
    assert sorted(each for each in copy.iterdir() if each.is_dir()) == there


@pytest.mark.parametrize("nodes", [0, pytest.param(2, marks=pytest.mark.on_demand)])
def test_damage_that_only_its_readers_find_leads_all_of_them_to_the_older_checkpoint(
    nodes: int, tmp_path: Path
) -> None:
    (whole, checkpoints), copy = undisturbed(), tmp_path / "copy"
    shutil.copytree(checkpoints, copy)
    newest = copy / "life-0001-step-0000000003"
    _damage(newest)
    more = ("--local-nodes", str(nodes)) if nodes else ()
    done = run(tmp_path, 2, options=("--checkpoint-dir", str(copy), *more))
    assert done.exit_code == 0, done.output
    assert "the checkpoint that this job starts from is damaged" in done.output
    assert (
        f"the job goes on after step 1, from life-0001-step-0000000001 in {copy}; {newest.name} is passed over"
        in done.output
    )
    assert last_words(done) == whole
    named = run(tmp_path / "named", 1, options=("--resume", str(newest)))
    assert named.exit_code != 0
    assert f"--resume {newest}" in named.output and "name an older one" in named.output


@pytest.mark.on_demand
def test_newcomers_that_still_read_a_slow_checkpoint_lose_nothing_when_all_others_are_killed(tmp_path: Path) -> None:
    """In the first step of a resumed job: with the last of those that began it, newcomers alone have what they read."""
    whole, checkpoints = undisturbed()
    options = ("--resume", str(checkpoints / "life-0001-step-0000000001"))
    struck = (("m1", "forward"), ("m0", "reduce"), ("m2", "reduce"))
    faults = [f"kill --target member:{member} --at step=2,phase={phase}" for member, phase in struck]
    done = run_job(
        tmp_path,
        workers=3,
        arguments=("--steps", str(STEPS)),
        options=options,
        faults=faults,
        script=SCRIPTS / "slow_reading_training.py",
        slow_until="m3",
    )
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 3
    assert "m3 reads slowly" in done.output
    assert last_words(done) == whole
