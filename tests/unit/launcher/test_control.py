"""What the operator hears of simulated nodes, some of which are stopped or know less than others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.cli.commands.chaos import chaos
from elastrain.launcher.cli.commands.inject import ask
from elastrain.launcher.core import Core
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.table import NOT_ARMED
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.job_values import JobConfig
from elastrain.launcher.shared.operator_messages import ANSWER, REQUEST, Answer, AskFault, AskState
from elastrain.launcher.shared.rundir import RunDir

KILL = AskFault(line="kill --target member:m1")


class PlayedAgent:
    """Answers on a node's socket until that is closed; `asked` has what came. A stopped one reads nothing."""

    def __init__(self, run: RunDir, *, redundancy: str = "", stopped: bool = False, armed: bool = True) -> None:
        self.asked: list[object] = []
        self._armed = armed
        self.state = describe(Core(JobConfig(workers=1), (), choose=lambda members: members[0]), "job", 0.0)
        self.state["redundancy"] = redundancy
        self._name = run.path.name
        self.listener = rundir.listen(run)
        if not stopped:
            self.listener.setblocking(True)
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock = self.listener.accept()[0]
            except OSError:
                return
            with sock, sock.makefile("rb") as lines:
                request = REQUEST.decode(lines.readline())
                self.asked.append(request)
                sock.sendall(ANSWER.encode(self._answer(request)))

    def _answer(self, request: object) -> Answer:
        if isinstance(request, AskState):
            return Answer(ok=True, state=self.state)
        return Answer(ok=self._armed, sentence=self._name if self._armed else NOT_ARMED)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(operator_messages, "_ONE_OF_SEVERAL_S", 1.0)
    return RunDir(path=tmp_path)


@pytest.fixture
def agents() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def agent(stack: ExitStack, whole: RunDir, name: str, *, redundancy: str = "", stopped: bool = False) -> PlayedAgent:
    played = PlayedAgent(rundir.of_node(whole, name), redundancy=redundancy, stopped=stopped)
    stack.callback(played.close)
    return played


@pytest.mark.slow
def test_a_stopped_node_is_not_asked_for_a_fault_and_does_not_hide_the_state(whole: RunDir, agents: ExitStack) -> None:
    """It would carry the fault out when it goes on, besides the node that was asked in its place."""
    agent(agents, whole, "node0", stopped=True)
    awake = agent(agents, whole, "node1")
    assert operator_messages.ask(whole, KILL).sentence == "node1"
    assert awake.asked == [AskState(), KILL]
    assert operator_messages.state(whole)["job"] == "job"


def test_of_several_nodes_one_that_knows_the_holders_is_asked(whole: RunDir, agents: ExitStack) -> None:
    fresh = agent(agents, whole, "node0")
    agent(agents, whole, "node1", redundancy="every shard survives the loss of 1 more")
    assert operator_messages.ask(whole, KILL).sentence == "node1"
    assert fresh.asked == [AskState()]


def test_a_spare_that_comes_first_does_not_hide_the_loss_and_the_redundancy(whole: RunDir, agents: ExitStack) -> None:
    agent(agents, whole, "node0")
    busy = agent(agents, whole, "node1", redundancy="every shard survives the loss of 1 more")
    busy.state |= {"step": 3, "loss": 0.5}
    told = operator_messages.state(whole)
    assert (told["step"], told["loss"], told["redundancy"]) == (3, 0.5, "every shard survives the loss of 1 more")


def test_the_one_agent_of_a_run_is_not_taken_for_a_launcher_of_nodes(whole: RunDir, agents: ExitStack) -> None:
    """It said that the fault was on its way, and only the event log that nobody could carry it out."""
    played = PlayedAgent(whole)
    agents.callback(played.close)
    with pytest.raises(ConfigError, match="has no launcher to ask"):
        ask(whole, grammar.parse("etcd-kill --target etcd"))
    assert played.asked == []
    assert ask(whole, grammar.parse("kill --target member:m0")).ok


def test_with_care_who_knows_the_holders_is_asked_first(whole: RunDir, agents: ExitStack) -> None:
    launcher = PlayedAgent(whole)
    agents.callback(launcher.close)
    node = agent(agents, whole, "node0")
    ask(whole, grammar.parse("partition --target node:node0"), ("m1",))
    assert node.asked == [AskFault(line="partition --target node:node0", careful_of=("m1",))]
    ask(whole, grammar.parse("etcd-kill --target etcd"), ())  # it costs nobody
    ask(whole, grammar.parse("partition --target node:node0"))
    assert [request.line.split()[0] for request in launcher.asked] == ["etcd-kill", "partition"]  # type: ignore[attr-defined]


def test_faults_at_random_for_a_run_that_takes_none_are_refused_at_once(whole: RunDir, agents: ExitStack) -> None:
    played = PlayedAgent(whole)
    agents.callback(played.close)
    whole.events.touch()
    with pytest.raises(ConfigError, match="this run is not armed: start it with --inject"):
        chaos(
            seed=1,
            mtbf=10.0,
            duration="1h",
            classes="kill",
            reckless=False,
            run=str(whole.path),
            named=None,
            as_json=False,
        )


def test_one_fault_for_a_run_that_takes_none_is_refused_as_many_are(whole: RunDir, agents: ExitStack) -> None:
    """It was exit code 1 for the one command and 2 for the other, with the same sentence."""
    played = PlayedAgent(whole, armed=False)
    agents.callback(played.close)
    with pytest.raises(ConfigError, match="this run is not armed: start it with --inject"):
        ask(whole, grammar.parse("kill --target member:m1"))


def test_where_nobody_answers_that_is_said(whole: RunDir, agents: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_messages, "_ONE_OF_SEVERAL_S", 0.1)
    for name in ("node0", "node1"):
        agent(agents, whole, name, stopped=True)
    with pytest.raises(operator_messages.NoAnswerError, match=r"node\d does not answer within 0.1 s"):
        operator_messages.ask(whole, KILL)
    with pytest.raises(operator_messages.NoAnswerError):
        operator_messages.state(whole)


def test_while_all_nodes_are_started_again_the_run_is_not_taken_for_over(whole: RunDir, agents: ExitStack) -> None:
    """`chaos` ended with an error at such a moment, and `status` said that there was no readable run."""
    for name in ("node0", "node1"):  # a node that is started again has said nothing yet
        rundir.of_node(whole, name)
    with pytest.raises(ConfigError, match="holds no readable run"):
        operator_messages.state(whole)
    launcher = PlayedAgent(whole)
    agents.callback(launcher.close)
    for request in (lambda: operator_messages.state(whole), lambda: operator_messages.ask(whole, KILL)):
        with pytest.raises(
            operator_messages.NoAnswerError, match=r"no node of .* is there just now: they are being started"
        ):
            request()
    assert launcher.asked == [AskState(), AskState()], "a fault for a node is no affair of the launcher"
