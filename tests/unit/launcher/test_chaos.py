"""Faults drawn from a seed: the same again, with the mean that was asked for, and only such as may be."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.cli.commands.chaos import Chaos, ChaosFlags, DrawnFault, _as_lines
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.fault import Fault, Scheme
from elastrain.launcher.faults.grammar import read_faults
from elastrain.launcher.faults.random_faults import (
    DEFAULT,
    STEP_PHASES,
    ChaosPlan,
    Draw,
    Situation,
    aim,
    draws,
    possible,
)
from elastrain.launcher.faults.table import CLASSES
from elastrain.launcher.faults.victims import MaybeLost
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.operator_messages import Answer

SITUATION = Situation(homes={"m0": "node0", "m3": "node1", "m7": "node2"}, several=True)
ALL = tuple(CLASSES)


def first(number: int, plan: ChaosPlan) -> list[Draw]:
    return list(itertools.islice(draws(plan), number))


def plan(**how: Any) -> ChaosPlan:
    return ChaosPlan(**{"seed": 5, "mean_s": 10.0, **how})


def test_a_seed_draws_the_same_again_and_another_one_something_else() -> None:
    assert first(50, plan()) == first(50, plan())
    assert first(50, plan()) != first(50, plan(seed=6))


def test_times_are_exponential_around_their_mean() -> None:
    times = [0.0, *(draw.at_s for draw in first(2000, plan()))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) > 0
    assert mean(gaps) == pytest.approx(10.0, rel=0.1)
    # Of an exponential distribution, 1 - 1/e lies below the mean.
    assert mean(gap < 10.0 for gap in gaps) == pytest.approx(0.632, abs=0.04)


@pytest.mark.parametrize("reckless", [False, True])
def test_what_is_drawn_is_a_line_that_a_faults_file_takes(reckless: bool) -> None:
    wild = plan(classes=ALL, reckless=reckless)
    faults = [fault for draw in first(1500, wild) if (fault := aim(draw, SITUATION, wild)) is not None]
    assert {fault.kind for fault in faults} == set(ALL)
    for fault in faults:
        assert grammar.parse(str(fault)) == fault
    assert {fault.target.scheme for fault in faults} == set(Scheme)


def test_only_the_named_classes_are_drawn_and_all_of_them() -> None:
    assert {draw.kind for draw in first(200, plan(classes=("kill", "slow")))} == {"kill", "slow"}
    assert set(DEFAULT) == {draw.kind for draw in first(400, plan())}


def test_a_class_that_is_named_several_times_is_drawn_so_many_times_as_often() -> None:
    drawn = Counter(draw.kind for draw in first(1000, plan(classes=("kill", "kill", "kill", "slow"))))
    assert drawn["kill"] == pytest.approx(750, abs=50)


def test_targets_are_among_the_living_and_all_of_them_are_meant() -> None:
    kills = plan(classes=("kill",))
    aimed = Counter(str(aim(draw, SITUATION, kills).target) for draw in first(1000, kills))  # type: ignore[union-attr]
    names = {f"member:{member}" for member in SITUATION.members} | {f"node:{node}" for node in SITUATION.nodes}
    assert set(aimed) == names
    assert min(aimed.values()) > 20


def test_a_job_of_one_node_is_struck_in_its_members_only() -> None:
    alone = Situation(homes={"m0": "node0", "m1": "node0"}, several=False)
    wild = plan(classes=ALL)
    faults = [aim(draw, alone, wild) for draw in first(500, wild)]
    assert {fault.target.scheme for fault in faults if fault is not None} == {Scheme.MEMBER}
    assert None in faults
    # Etcd is there as long as the job is, also while one node has all members.
    last = Situation(homes={"m0": "node0"}, several=True)
    assert Scheme.ETCD in {fault.target.scheme for draw in first(100, wild) if (fault := aim(draw, last, wild))}
    assert aim(first(1, plan())[0], Situation(homes={}, several=True), plan()) is None


def test_with_care_nothing_waits_for_a_recovery_and_flips_strike_what_every_job_has() -> None:
    careful = first(1000, plan(classes=ALL))
    assert {draw.phase for draw in careful} == {None, *STEP_PHASES}
    flips = {dict(draw.options)["where"] for draw in careful if draw.kind == "flip"}
    assert flips == {"parameters", "taken", "moments", "backup", "gradient", "partial"}
    reckless = first(1000, plan(classes=ALL, reckless=True))
    assert "decide" in {draw.phase for draw in reckless}


def test_exceptions_have_texts_of_their_own() -> None:
    """Else two of them at one place would be the script's fault, and end the job."""
    raised = first(50, plan(classes=("exception",)))
    assert len({draw.options for draw in raised}) == 50


def test_the_situation_is_read_from_what_status_shows() -> None:
    members = [
        {"id": "m0", "node": "node1", "rank": 0, "state": "member"},
        {"id": "m1", "node": "node0", "rank": 1, "state": "gone"},
        {"id": "m2", "node": "node0", "rank": 2, "state": "member"},
        {"id": "m3", "node": "node0", "rank": None, "state": "starting"},
    ]
    situation = Situation.of({"members": members, "nodes": [{"node": "node0"}, {"node": "node1"}]})
    assert situation == Situation(homes={"m0": "node1", "m2": "node0"}, several=True)
    assert situation.nodes == ("node0", "node1")


def test_an_unknown_class_is_said() -> None:
    with pytest.raises(ConfigError, match="--classes: unknown fault class 'maim'"):
        plan(classes=("kill", "maim"))
    with pytest.raises(ConfigError, match="names no class"):
        ChaosFlags(seed=1, classes="").plan()


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("1.5m", 90.0), ("2h", 7200.0), ("5s", 5.0)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert ChaosFlags(seed=1, duration=text).for_s() == seconds


def test_a_wrong_time_is_said() -> None:
    with pytest.raises(ConfigError, match="--for '1d'"):
        ChaosFlags(seed=1, duration="1d").for_s()


# ---- the command, with a job that is played


@dataclass
class PlayedJob:
    """It ends at `ends_s`; every second request is refused. `stopped`: from when until when nobody answers."""

    ends_s: float
    now: float = 0.0
    stopped: tuple[float, float] = (0.0, 0.0)
    asked: list[tuple[float, str, tuple[str, ...] | None]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        if self.stopped[0] < self.now < self.stopped[1]:
            raise operator_messages.NoAnswerError("the agent does not answer")
        over = self.now >= self.ends_s
        members = [{"id": f"m{n}", "node": "node0", "rank": n, "state": "member"} for n in range(3)]
        end = {"sentence": "finished after step 9"} if over else None
        code = 3 if over else None
        told = {"state": "running", "exit_code": code, "members": members, "nodes": [], "running_s": 100.0 + self.now}
        return {**told, "step": 9, "steps_lost": 0, "end": end}

    def ask(self, fault: Fault, careful_of: tuple[str, ...] | None) -> Answer:
        self.asked.append((self.now, str(fault), careful_of))
        return Answer(ok=len(self.asked) % 2 == 1, sentence=f"answer {len(self.asked)}")

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def played(job: PlayedJob, for_s: float, **how: Any) -> tuple[int, Sequence[Any]]:
    shown: list[Any] = []
    chaos = Chaos(job, plan(**how), for_s, shown.append, lambda: job.now, job.sleep)  # type: ignore[arg-type]
    return chaos.run(), shown


def test_faults_strike_at_their_times_and_the_exit_code_is_the_jobs() -> None:
    job = PlayedJob(ends_s=1000.0)
    code, shown = played(job, 100.0)
    expected = [draw.at_s for draw in first(100, plan()) if draw.at_s <= 100.0]
    assert [at_s for at_s, _, _ in job.asked] == pytest.approx(expected)
    assert all(careful_of is not None for _, _, careful_of in job.asked)
    assert code == 3
    *outcomes, summary = shown
    assert (summary["drawn"], summary["struck"]) == (len(expected), (len(expected) + 1) // 2)
    assert summary["end"] == "finished after step 9"
    # What it prints strikes at the same time after the job's start.
    fault = outcomes[0].fault
    assert fault.place.t_s == pytest.approx(100.0 + expected[0], abs=1e-3)
    assert grammar.parse(str(fault)) == fault
    assert job.now >= 1000.0


def test_a_job_that_ends_is_struck_no_more() -> None:
    job = PlayedJob(ends_s=30.0)
    code, _ = played(job, 1000.0, reckless=True)
    assert code == 3
    assert job.asked
    assert all(at_s < 30.0 and careful_of is None for at_s, _, careful_of in job.asked)


def test_while_all_agents_are_stopped_chaos_waits_for_them() -> None:
    job = PlayedJob(ends_s=200.0, stopped=(50.0, 60.0))
    code, shown = played(job, 100.0)
    assert code == 3
    assert max(at_s for at_s, _, _ in job.asked) > 60.0
    assert shown[-1]["end"] == "finished after step 9"


def test_who_was_struck_with_care_is_spared_company_until_he_is_gone_or_goes_on() -> None:
    """The job of three is told whom it may have lost by then."""
    job = PlayedJob(ends_s=1000.0)
    played(job, 60.0, classes=("hang",))
    (_, first_line, nobody), (_, _, still_nobody), (_, _, third), *_ = job.asked
    first = grammar.parse(first_line)
    assert nobody == ()
    assert still_nobody == (first.member,)
    assert third == (first.member,)  # the second request was refused


def test_who_may_be_lost_is_forgotten_with_a_death_or_some_time_after_the_fault() -> None:
    homes, living = {"m0": "node0", "m1": "node0", "m2": "node1"}, ("m0", "m1", "m2")
    maybe_lost = MaybeLost()
    maybe_lost.note(grammar.parse("stop --target node:node0 --for 2"), homes, 100.0)
    maybe_lost.note(grammar.parse("kill --target member:m2 --at phase=commit"), homes, 100.0)
    maybe_lost.note(grammar.parse("slow --target member:m2"), homes, 100.0)
    assert set(maybe_lost.members(living, 111.9)) == {"m0", "m1", "m2"}
    assert maybe_lost.members(living, 112.1) == ("m2",)
    assert maybe_lost.members(("m0", "m1", "m3"), 113.0) == ()
    # A flip has no end, and is found and put right, or costs its member, within a few steps.
    maybe_lost.note(grammar.parse("flip --target member:m0"), homes, 200.0)
    assert maybe_lost.members(living, 209.9) == ("m0",)
    assert maybe_lost.members(living, 210.1) == ()


def test_what_is_printed_is_a_file_that_has_the_faults_that_struck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, shown = played(PlayedJob(ends_s=200.0), 100.0)
    for told in shown:
        _as_lines(told)
    schedule = tmp_path / "schedule.txt"
    schedule.write_text(capsys.readouterr().out)
    struck = [told.fault for told in shown if isinstance(told, DrawnFault) and told.struck]
    assert list(read_faults(schedule)) == struck != []


def test_what_the_job_cannot_carry_out_is_never_drawn_and_said_once() -> None:
    wanted = plan(classes=("kill", "partition", "loss", "partition", "etcd-kill"))
    left, sentence = possible(wanted, ("etcd-kill", "etcd-stop"))
    assert left.classes == ("kill", "etcd-kill")
    assert sentence.startswith("partition, loss cannot be carried out in this job")
    assert possible(wanted, ("etcd-kill", "partition", "loss")) == (wanted, "")
    with pytest.raises(ConfigError, match="flap cannot be carried out"):
        possible(plan(classes=("flap",)), ())
