"""One case from its start to its verdict, on real processes; the folder stays for whoever wants to know why."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from dataclasses import replace
from pathlib import Path

from elastrain.memory.memory_budget import WRITING_BYTES
from experiments.jobs import Script, Start, alone, elastic, finish
from experiments.journals import Follower, Tail
from experiments.storm.cases import Case
from experiments.storm.oracle import Outcome, difference, read_steps, unfinished
from experiments.storm.permission import commits
from experiments.storm.processes import MARK, Processes, leftovers
from experiments.storm.strikes import Striker
from experiments.storm.surroundings import AMPLE_BYTES, FIRST_RUN_STEPS, NO_ROOM, limit_of, peaks_of

TRAIN = Path(__file__).with_name("train.py")
NOTE_EVERY_S = 0.5
START_S = 180.0
"""The longest time before the first commit."""
STILL_S = 60.0
"""No commit for so long, with nobody stopped and nothing parked: not slowness, but a job that stands still."""
PARKED_S = 180.0
GIVEN_UP_S = 420.0
RESTARTS = 40


def run_case(case: Case, folder: Path, *, start: Start = subprocess.Popen) -> Outcome:
    """Run it in `folder`. Raises RuntimeError if the script cannot do it even alone."""
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(case.to_json())
    (folder / "case.txt").write_text(f"{case}\n")
    begun_s, outcome = time.monotonic(), Outcome(seed=case.seed)
    mark = uuid.uuid4().hex
    processes = Processes(mark)
    temporary = folder / "tmp"
    temporary.mkdir()
    script = Script(path=TRAIN, args=(str(folder / "case.json"),))
    with alone(folder / "alone", script, start=start) as reference:
        options = case.started.options(folder, _limit_bytes(case, folder, start))
        _storm(case, folder / "run", temporary, script, options, processes, mark, outcome, start)
        finish(reference, folder / "alone", timeout_s=GIVEN_UP_S)
    _judge(folder, outcome)
    if not (outcome.hang or outcome.too_slow):  # else it was ended from here
        outcome.leftovers = leftovers(processes, folder / "run", temporary, _job(folder / "run"))
        outcome.leftovers += tuple(f"file {path}" for path in (folder / "spilled").glob("*"))
    processes.end()
    outcome.seconds = time.monotonic() - begun_s
    (folder / "outcome.txt").write_text("\n".join([*outcome.struck, *outcome.sentences()]) + "\n")
    return outcome


def _limit_bytes(case: Case, folder: Path, start: Start) -> int | None:
    """Of each member's memory; a tight one is found by a short run of the same job without faults."""
    started = case.started
    if started.memory != "tight":
        return AMPLE_BYTES if started.memory == "ample" else None
    first = folder / "first"
    first.mkdir()
    training = replace(case.training, steps=FIRST_RUN_STEPS)
    (first / "case.json").write_text(replace(case, training=training).to_json())
    options = replace(started, checkpoints="none", spills=False).options(first, AMPLE_BYTES)
    script = Script(path=TRAIN, args=(str(first / "case.json"),))
    nodes = case.nodes if case.nodes > 1 else None
    with elastic(first / "run", script, members=case.workers, nodes=nodes, options=options, start=start) as process:
        finish(process, first / "run", timeout_s=GIVEN_UP_S)
    journals = (Tail(path).read() for path in (first / "run" / "members").glob("*.jsonl"))
    return limit_of(started, peaks_of(journals), WRITING_BYTES)


def _storm(
    case: Case,
    run: Path,
    temporary: Path,
    script: Script,
    options: tuple[str, ...],
    processes: Processes,
    mark: str,
    outcome: Outcome,
    start: Start,
) -> None:
    """The job under its faults, to its end or until it is given up."""
    follower = Follower(run)
    # What Python reads when it starts, warm processes cannot be told.
    extra = {MARK: mark} | ({"PYTHONFAULTHANDLER": "1"} if start is subprocess.Popen else {})
    striker = Striker(case=case, folder=run, processes=processes, follower=follower)
    with elastic(
        run,
        script,
        members=case.workers,
        nodes=case.nodes if case.nodes > 1 else None,
        options=("--max-restarts", str(RESTARTS), *options),
        temporary=temporary,
        environment=extra,
        start=start,
    ) as process:
        try:
            _follow(process, striker, outcome)
        finally:
            striker.let_all_go_on()
            if process.poll() is None:
                processes.end()
    follower.look()
    outcome.kills, outcome.stops, outcome.struck = striker.kills, striker.stops, striker.struck
    outcome.commits = commits(striker.run)
    if process.returncode and not (outcome.hang or outcome.too_slow):
        told = f"exit code {process.returncode}: {_last_words(run)}"
        # Fewer members hold more each, and a limit that sufficed for all may not for them.
        outcome.no_room = told if case.started.memory == "tight" and NO_ROOM in told else ""
        outcome.false_end = "" if outcome.no_room else f"{told}, although every shard had a living holder"


def _follow(process: subprocess.Popen[bytes], striker: Striker, outcome: Outcome) -> None:
    begun_s = commit_s = noted_s = time.monotonic()
    known = 0
    while process.poll() is None:
        striker.follower.look()
        striker.look()
        now_s = time.monotonic()
        if (seen := commits(striker.run)) > known:
            known, commit_s = seen, now_s
        if now_s - noted_s > NOTE_EVERY_S:
            striker.processes.note_segments()
            noted_s = now_s
        still_s = now_s - max(commit_s, striker.last_event_s)
        if still_s > (STILL_S if known else START_S) and (why := _stands_still(striker, still_s)):
            outcome.hang = f"{why} after commit {known}"
            _keep_evidence(striker)
            return
        if now_s - begun_s > GIVEN_UP_S:
            outcome.too_slow = f"{known} commits within {GIVEN_UP_S:g} s"
            return
        time.sleep(striker.look_again_s)


def _stands_still(striker: Striker, still_s: float) -> str:
    """Empty while the job says what it waits for, and has not waited too long."""
    reasons = {str(state["parked"]) for state in striker.states() if state["parked"]}
    if reasons and still_s < PARKED_S:
        return ""
    return f"no commit for {still_s:.0f} s" + (f", parked: {'; '.join(sorted(reasons))}" if reasons else "")


def _keep_evidence(striker: Striker) -> None:
    """What the agents say, and the stacks of all processes; agents end by it."""
    (striker.folder / "states.json").write_text(json.dumps(striker.states(), indent=1, default=str))
    workers = [pid for pid in striker.run.pids.values() if striker.processes.owns(pid)]
    striker.processes.dump_stacks(workers)


def _judge(folder: Path, outcome: Outcome) -> None:
    members = read_steps(folder / "run")
    reference = read_steps(folder / "alone")["alone"]
    outcome.mismatch = difference(members, reference)
    if not (outcome.mismatch or outcome.hang or outcome.too_slow or outcome.no_room or outcome.false_end):
        outcome.false_end = unfinished(members, reference)


def _job(run: Path) -> str:
    try:
        with (run / "events.jsonl").open() as lines:
            return str(json.loads(lines.readline()).get("job", ""))
    except (OSError, ValueError):
        return ""


def _last_words(run: Path) -> str:
    lines = (run / "output.log").read_text(errors="replace").splitlines()
    told = [line for line in lines if line.startswith("elastrain:")] or lines
    return " / ".join(told[-2:])[-600:] or "(no output)"
