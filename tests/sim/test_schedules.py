"""The step and recovery protocol under thousands of seeded schedules: crashes, zombies, joins, isolation, flips."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from elastrain import protocol as p
from elastrain.job.values import Contribution
from tests.sim import replay
from tests.sim.cluster import Cluster, Scenario, truth_of
from tests.sim.member import Violation
from tests.sim.scenarios import cluster_of, draw

CHUNK = 250
CHUNKS = 2
LOST_AT_MOST = 0.2
"""Half of the schedules kill members without regard to backups (one in five has none). The cluster sees to it that only
those end as lost where every holder of a shard is really gone."""


def run_schedules(seeds: range) -> Counter[str]:
    ended: Counter[str] = Counter()
    for seed in seeds:
        cluster = cluster_of(seed)
        try:
            cluster.run()
        except Exception as error:  # noqa: BLE001  the seed has to be named whatever went wrong
            where = traceback.extract_tb(error.__traceback__)[-1]
            pytest.fail(
                f"seed {seed} ({cluster.scenario}): {type(error).__name__}: {error} [{where.name}:{where.lineno}]; "
                f"replay it with: python -m tests.sim.replay {seed}",
                pytrace=False,
            )
        ended[cluster.outcome] += 1
        ended["faults"] += cluster.struck
    return ended


def report(ended: Counter[str]) -> str:
    return f"{ended['ok']} ok, {ended['lost']} lost, {ended['diverged']} diverged on purpose, {ended['faults']} faults"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_schedule_ends_as_the_undisturbed_job_or_says_why_not(
    chunk: int, record_property: Callable[[str, object], None]
) -> None:
    ended = run_schedules(range(chunk * CHUNK, (chunk + 1) * CHUNK))
    record_property("figures", f"schedules: {report(ended)}")
    assert ended["lost"] <= LOST_AT_MOST * CHUNK
    assert ended["faults"] >= CHUNK  # a schedule without faults shows nothing


@pytest.mark.parametrize("forgotten", [p.Apply, p.Bind, p.TakeParameters])
def test_a_command_that_writes_parameters_and_does_not_say_so_is_found(
    forgotten: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = p.overwrites
    monkeypatch.setattr(p, "overwrites", lambda command: () if isinstance(command, forgotten) else said(command))
    with pytest.raises(Violation, match=f"{forgotten.__name__} writes parameters, and `overwrites` does not say so"):
        [cluster_of(seed).run() for seed in range(EARLY)]


EARLY = 150


def early(seed: int) -> Cluster:
    """A job of this seed whose members die, sleep, join and are cut off mostly before the first commit.

    Half of these jobs start from a checkpoint, which members read while that happens.
    """
    rng = random.Random(f"early {seed}")
    sizes = Scenario(
        members=rng.choice([1, 2, 3, 4]), steps=3, runs=rng.choice([1, 3, 4]), backups=rng.choice([0, 1, 2])
    )
    scenario = replace(
        sizes,
        early=True,
        crashes=rng.choice([1, 2, 3]),
        zombies=rng.choice([0, 0, 1]),
        joins=rng.choice([0, 1, 2]),
        isolated=rng.choice([False, False, True]),
        slow=rng.choice([0.0, 0.3]),
        resumes=rng.choice([None, None, -1, 0, 1]),
    )
    return Cluster(scenario, seed, truth_of(Scenario(steps=3, runs=sizes.runs, backups=sizes.backups)))


def test_members_lost_before_the_first_commit_change_no_bit_and_end_no_job() -> None:
    ended: Counter[str] = Counter()
    for seed in range(EARLY):
        cluster = early(seed)
        try:
            cluster.run()
        except Exception as error:  # noqa: BLE001  the seed has to be named whatever went wrong
            pytest.fail(f"seed {seed} ({cluster.scenario}): {type(error).__name__}: {error}", pytrace=False)
        ended[cluster.outcome] += 1
    assert ended["lost"] <= 1.5 * LOST_AT_MOST * EARLY  # some are struck again behind the first commit, without backups


def slow_behind(seed: int) -> Cluster:
    """A job of this seed that loses a member, and in which digests take longer than the few runs."""
    rng = random.Random(f"behind {seed}")
    members = rng.choice([3, 4])
    scenario = Scenario(
        members=members,
        runs=members,
        steps=8,
        backups=rng.choice([1, 2]),
        budget_bytes=rng.choice([1, 20, 1 << 20]),
        joins=rng.choice([0, 1]),
        crashes=1,
        slow_behind=True,
    )
    return Cluster(scenario, seed, truth_of(Scenario(steps=8, runs=members)))


@pytest.mark.parametrize("seed", range(15, 30))
def test_a_lost_backup_comes_back_where_digests_take_longer_than_runs(seed: int) -> None:
    cluster = slow_behind(seed)
    cluster.run()
    assert cluster.outcome == "ok"


@pytest.mark.parametrize("stops", [1, 2, 3, 4])
def test_loops_that_are_left_at_different_steps_end_as_most_of_them_do_with_one_digest(stops: int) -> None:
    """Two of four that leave early decide, too, since the lowest rank is one of them; one alone is told and goes."""
    truth = truth_of(Scenario(runs=5))
    for seed in range(20):
        rng = random.Random(f"stops {seed}")
        stalls, joins, slow = rng.choice([0, 1]), rng.choice([0, 0, 1]), rng.choice([0.0, 0.3])
        scenario = Scenario(members=4, runs=5, backups=2, stops=stops, stalls=stalls, joins=joins, slow=slow)
        cluster = Cluster(scenario, seed, truth)
        cluster.run()
        assert cluster.outcome == "ok", f"seed {seed}"
        stayed = [cluster.members[m] for m in cluster.view.ids if m not in cluster.dead]
        trained = [member for member in stayed if not member.machine.loop.is_outside]  # a joiner may have come too late
        last = 3 if stops == 1 else 1
        assert {member.committed for member in trained} == {last}, f"seed {seed}"
        assert {member.digest() for member in trained} == {truth.digests[last]}, f"seed {seed}"


@pytest.mark.on_demand
@pytest.mark.timeout(0)
def test_as_many_schedules_as_asked_for(record_property: Callable[[str, object], None]) -> None:
    """ELASTRAIN_SCHEDULES says how many (100,000), ELASTRAIN_FIRST_SEED where to begin."""
    first = int(os.environ.get("ELASTRAIN_FIRST_SEED", str(CHUNK * CHUNKS)))
    count = int(os.environ.get("ELASTRAIN_SCHEDULES", "100000"))
    ended = run_schedules(range(first, first + count))
    record_property("figures", f"schedules: {report(ended)}")
    assert ended["lost"] <= LOST_AT_MOST * count


def test_a_seed_replays_the_same_schedule() -> None:
    seed = next(s for s in range(100) if draw(s).crashes and draw(s).joins and draw(s).members > 2)
    transcripts: list[list[str]] = [[], []]
    for lines in transcripts:
        cluster = cluster_of(seed)
        cluster.tell = lines.append
        cluster.run()
    assert transcripts[0] == transcripts[1]
    assert any("FAULT" in line for line in transcripts[0])


def test_replay_prints_the_transcript_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["7"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 7: Scenario(")
    assert "view 2: m0" in printed
    assert "ended " in printed.splitlines()[-1]


@pytest.mark.parametrize("seed", [14166, 103806])
def test_a_schedule_that_once_failed_ends_well(seed: int) -> None:
    assert run_schedules(range(seed, seed + 1))["ok"] == 1


def _noisy(seed: int) -> Cluster:
    """A job whose members round differently: there is no undisturbed one to compare with, only each other.

    No bits flip: who leaves a step with wrong parameters is found later, and here nobody could say which are wrong.
    """
    return Cluster(replace(draw(seed), noisy=True, flips=0, resumes=None), seed, None)


NOISY = 100


def test_members_that_round_differently_still_agree_and_count_every_sample_once() -> None:
    ended: Counter[str] = Counter()
    for seed in range(NOISY):
        cluster = _noisy(seed)
        cluster.run()
        ended[cluster.outcome] += 1
        for step, told in cluster.seen.told.items():
            contribution = told[0]
            assert isinstance(contribution, Contribution)
            assert contribution.samples == 2 * cluster.scenario.runs, f"seed {seed}, step {step}"
    assert ended["ok"] >= NOISY // 2


def _ends_in_disagreement(seed: int) -> bool:
    cluster = _noisy(seed)
    for member in cluster.members.values():
        member.machine.shape = replace(member.machine.shape, deterministic=True)
    try:
        cluster.run()
    except Violation as violation:
        return "different contributions" in str(violation) or "came out differently" in str(violation)
    return False


def test_what_is_compared_to_the_bit_would_end_a_job_whose_members_round_differently() -> None:
    assert any(_ends_in_disagreement(seed) for seed in range(NOISY))
