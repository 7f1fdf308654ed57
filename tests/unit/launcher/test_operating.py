"""The commands `ls`, `logs`, `stop` and `drain`, and the agents' decisions about the last two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastrain.launcher.cli.command_line import app
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.leaving.stopping import STOPPED
from elastrain.launcher.shared.job_values import TellNodes
from elastrain.launcher.shared.notices import StopNode
from tests.unit.launcher.test_core import NOW, Job, of, running


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTRAIN_HOME", str(tmp_path))
    return tmp_path


def made(home: Path, job: str, wall: float) -> Path:
    folder = home / "runs" / job
    folder.mkdir(parents=True)
    start = {"wall": wall, "event": "start", "logs": str(folder / "elsewhere")}
    (folder / "events.jsonl").write_text(json.dumps(start) + '\n{"event": "sta')
    return folder


def write(folder: Path, member: str, text: str) -> None:
    (folder / "elsewhere" / member).mkdir(parents=True)
    (folder / "elsewhere" / member / "stdout.log").write_text(text)


def told(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


def test_runs_are_listed_the_newest_first_also_those_that_cannot_be_read(home: Path) -> None:
    for number, job in enumerate(("old", "newest", "new")):
        made(home, job, wall=(1.0, 3.0, 2.0)[number])
    code, output = told("ls", "--json")
    rows = [json.loads(line) for line in output.splitlines()]
    assert (code, [row["job"] for row in rows]) == (0, ["newest", "new", "old"])
    assert {row["state"] for row in rows} == {"unreadable"}


def test_the_output_of_all_members_or_of_one(home: Path) -> None:
    folder = made(home, "job", 1.0)
    write(folder, "m0", "one\ntwo\nhalf")
    write(folder, "m1", "three\n")
    assert told("logs") == (0, "[m0] one\n[m0] two\n[m1] three\n")
    assert told("logs", "m1", "--run", "job") == (0, "three\n")
    code, output = told("logs", "m7")
    assert code == 2 and "no member m7" in output and "--tee 3" in output


def test_follow_ends_with_the_run(home: Path) -> None:
    folder = made(home, "job", 1.0)
    write(folder, "m0", "one\n")
    state = running(1).core
    from elastrain.launcher.agent.run_state import describe

    (folder / "run.json").write_text(json.dumps(describe(state, "job", NOW)))
    assert told("logs", "--follow") == (0, "[m0] one\n"), "its agent is not there: it has vanished"


@pytest.mark.parametrize("words", [("stop",), ("drain", "node0")])
def test_a_run_that_is_over_cannot_be_stopped(home: Path, words: tuple[str, ...]) -> None:
    made(home, "job", 1.0)
    code, output = told(*words)
    assert code == 2 and "has ended: there is nothing to ask" in output


@pytest.mark.parametrize("words", [("stop", "nothing"), ("drain", "n", "--run", "nothing"), ("drain", "")])
def test_bad_input_ends_with_a_sentence(home: Path, words: tuple[str, ...]) -> None:
    code, output = told(*words)
    assert code == 2 and output.count("\n") == 1


def test_help_has_a_short_name_everywhere() -> None:
    for words in ((), ("run",), ("checkpoint", "ls"), ("drain",)):
        assert told(*words, "-h") == told(*words, "--help")


def test_the_help_of_run_has_headings() -> None:
    lines = told("run", "--help")[1].splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith((" ", "Usage"))]
    assert headings[:4] == ["Arguments:", "Size:", "Nodes:", "Login to etcd:"] and len(headings) >= 10
    assert not [line for line in lines if line.startswith("  --") and line.split()[0] == "--help"][1:]


# ---- what agents decide


def two_nodes() -> tuple[Job, Job]:
    one, other = (Job(1, node=name, nodes_max=2, incarnation=number) for number, name in ((1, "a"), (2, "b")))
    records = [job.core.cluster.peers.record for job in (one, other)]
    for job, record in ((one, records[1]), (other, records[0])):
        job.happen(ev.NodeCame(record=record))
        job.happen(ev.LinkChanged(node=record.name, up=True, reason=""))
    return one, other


def test_stop_ends_all_nodes_whichever_is_asked() -> None:
    one, other = two_nodes()
    answer = one.core.stopping.stop_all(NOW)
    notice = next(each.message for each in of(TellNodes, answer.commands) if isinstance(each.message, StopNode))
    other.happen(ev.NoticeCame(node="a", notice=notice))
    ends = [job.core.shutdown.end for job in (one, other)]
    assert answer.taken and [end.code for end in ends if end is not None] == [STOPPED, STOPPED]


def test_drain_goes_to_the_node_that_is_named() -> None:
    one, _ = two_nodes()
    answer = one.core.stopping.drain("b", NOW)
    assert answer.taken and one.core.shutdown.end is None
    assert [(each.node, type(each.message)) for each in of(TellNodes, answer.commands)] == [("b", StopNode)]


def test_drain_refuses_what_would_hand_over_to_nobody() -> None:
    job = running(2)
    for name, words in (("m1", "only node"), ("node0", "only node"), ("nobody", "there are node0")):
        answer = job.core.stopping.drain(name, NOW)
        assert not answer.taken and not answer.commands and words in answer.sentence
