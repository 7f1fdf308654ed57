"""The experiment with accelerators: its table, its cases, and its planted bugs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from elastrain.job.world import PHASES
from experiments.accelerator import run as experiment_run
from experiments.accelerator.cases import Case, all_cases, reference_of
from experiments.accelerator.checkouts import TURN_STEPS, Stopped, compared
from experiments.accelerator.jobs import Job, Ran, total
from experiments.accelerator.measures import PARTS, Bench
from experiments.accelerator.models import FIRST, FOR_GPU, SETUPS, Training
from experiments.accelerator.plants import PLANTS, changed_code
from experiments.accelerator.run import REACHES, Experiment, _run_all
from experiments.harness import ROOT
from tests.support import warm

README = ROOT / "experiments" / "accelerator" / "README.md"
MEASURED_BY_HAND = {"test_seconds"}


def test_the_table_has_the_keys_and_their_reaches() -> None:
    rows = [line.split("|")[1:4] for line in README.read_text().splitlines() if line.startswith("| `")]
    told = {}
    for keys, _, reaches in rows:
        names, limits = re.findall(r"`(\w+)`", keys), [each.strip() for each in reaches.split(",")]
        told |= dict(zip(names, limits * (len(names) if len(limits) == 1 else 1), strict=True))
    assert {key: str(reach) for key, reach in REACHES.items()} == {k: v for k, v in told.items() if v != "–"}
    assert set(told) - set(REACHES) == MEASURED_BY_HAND
    assert {key for _, keys in PARTS.values() for key in keys} <= set(REACHES)


def test_cases_have_every_model_and_every_phase_at_every_place() -> None:
    cases = all_cases("late")
    names = {case.name for case in cases}
    assert len(names) == len(cases)
    assert {f"{model}, 3 members" for model in SETUPS} <= names
    places = ("", "stage 0: ", "stage 1: ", "stage 2: ", "in place: ", "in place: stage 1: ")
    assert {f"{place}killed in {phase}" for place in places for phase in PHASES} <= names
    assert all(reference_of(case.job.training).device == "cpu" for case in cases)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_has_its_place_in_the_product(name: str) -> None:
    function, code = changed_code(PLANTS[name])
    assert code.co_freevars == function.__code__.co_freevars and code.co_code != function.__code__.co_code


def test_races_are_counted_from_facts_and_from_tracebacks(tmp_path: Path) -> None:
    for part in ("steps", "facts"):
        (tmp_path / part).mkdir()
    (tmp_path / "facts" / "m0.jsonl").write_text('{"step": 0, "races": ["a"], "descriptors": 9}\n')
    (tmp_path / "output.log").write_text("RaceError: b\nelastrain: m1 ended by SIGSEGV\n")
    ran = Ran(folder=tmp_path, job=Job(training=Training()), code=0)
    assert ran.races == ["a", "b"] and ran.touches == 1
    assert total([{"races": ran.races, "digest": "wrong"}, {"races": ["c"], "steps_lost": 2}]) == {
        "races": 3,
        "digest": 1,
        "steps_lost": 2,
    }


def test_a_reference_is_compared_up_to_the_last_step_of_a_shorter_job(tmp_path: Path) -> None:
    def ran(name: str, lines: list[str]) -> Ran:
        (tmp_path / name / "steps").mkdir(parents=True)
        (tmp_path / name / "steps" / "alone.txt").write_text("".join(f"{line}\n" for line in lines))
        return Ran(folder=tmp_path / name, job=Job(training=Training()), code=0)

    longest = ran("longest", ["0 aa 1.0", "1 bb 0.9", "2 cc 0.8", "3 cc"])
    assert longest.until(2) == ["0 aa 1.0", "1 bb 0.9", "2 bb"]
    assert longest.until(3) == longest.steps["alone"]
    broken = ran("broken", ["0 aa 1.0"])
    assert broken.until(2) == ["0 aa 1.0"]


def test_no_case_begins_that_would_not_end_in_time() -> None:
    ran: list[int] = []

    def case(number: int) -> None:
        time.sleep(0.2)
        ran.append(number)

    cases = [lambda number=number: case(number) for number in range(9)]
    assert _run_all(cases, 1, time.monotonic() + 0.5) == (2, 0)
    assert ran == [0, 1]


@pytest.mark.slow
def test_a_job_that_runs_when_the_time_is_over_is_cut_off_and_counts_as_nothing(tmp_path: Path) -> None:
    slow = Job(training=Training(device="cpu", steps=500, pause_s=0.2))
    case = Case(key="digest_equal_cpu", name="slow", job=slow)
    until_s = time.monotonic() + 2.0
    experiment = Experiment(tmp_path, "cpu", warm.Popen, until_s)
    compared_with = Ran(folder=tmp_path, job=slow, code=0)  # it was there before
    experiment.compared.get(reference_of(slow.training).to_json(), lambda: compared_with)

    def measure(bench: Bench) -> dict[str, float]:
        bench.run("slow", slow.training)
        return {"waits_per_step": 1.0}

    trials = [lambda: experiment.try_case(case, 0), lambda: experiment.measure("slow", 1)]
    with patch.dict(experiment_run.PARTS, {"slow": (measure, ("waits_per_step",))}):
        assert _run_all(trials, 2, until_s) == (2, 2)
    assert time.monotonic() < until_s + 30.0
    assert not (experiment.passed or experiment.failed or experiment.measured)


TURNED = """
import json, sys, time

spin_s, folder, steps = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with open(f"{folder}/members/m0.jsonl", "a") as journal:
    for step in range(steps):
        until_s = time.process_time() + spin_s
        while time.process_time() < until_s:
            pass
        passed = {"event": "passed", "step": step, "generation": 1, "t": time.monotonic()}
        print(json.dumps(passed | {"loss": 1.0, "samples": 1, "fingerprint": 1}), file=journal, flush=True)
        print(f"step {step:5d}", flush=True)
"""


def test_two_checkouts_take_turns_of_whole_steps_and_the_slower_one_is_seen(tmp_path: Path) -> None:
    rounds, jobs = 4, list[Stopped]()
    for name, spin_s in (("after", 0.04), ("before", 0.02)):
        (tmp_path / name / "members").mkdir(parents=True)
        with (tmp_path / name / "output.log").open("wb") as output:
            steps = FIRST + 1 + (rounds + 1) * (TURN_STEPS + 1)
            command = [sys.executable, "-c", TURNED, str(spin_s), str(tmp_path / name), str(steps)]
            jobs.append(Stopped(subprocess.Popen(command, stdout=output), tmp_path / name))
    try:
        for job in jobs:
            job.begin()
        for job in [*jobs, *jobs[::-1]] * (rounds // 2):
            job.take_turn()
            seen = job.steps_seen()
            time.sleep(0.3)
            assert job.steps_seen() <= seen + 1, "it goes on behind its turn"
        for job in jobs:
            job.end()
    finally:
        for job in jobs:
            job.process.kill()
            job.process.wait()
    assert all(len(turn.steps) == TURN_STEPS for job in jobs for turn in job.turns)
    assert not set(jobs[0].turns[0].steps) & set(jobs[0].turns[1].steps)
    found = compared(*jobs)
    assert 1.6 < found["cpu_price_processor"] < 2.6
    assert 0.035 < found["cpu_step_processor_s"] < 0.06


def test_a_training_is_told_to_its_script_as_json() -> None:
    for model in (*SETUPS, *FOR_GPU):
        training = Training(model=model, troubles=(("m1", 2, "killed"),), timed=True)
        told = Training(**json.loads(training.to_json()))
        assert (told.setup, told.order, told.timed) == (training.setup, training.order, True)
