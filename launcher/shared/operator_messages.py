"""Requests of the operator's commands to a run, and their answers: one line of JSON each over a control socket.

The functions are the operator's side: they send a request to the agents or to the launcher of simulated nodes, or read
the state that an ended run left in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.rundir import RunDir
from elastrain.protocol.codec import LINE_BYTES_MAX, BadMessageError, LineCodec, Tagged


class AskState(Tagged, frozen=True, kw_only=True):
    """Request for the state that `elastrain status` shows."""


class _NodeState(TypedDict):
    node: str
    state: str


class _MemberState(TypedDict):
    rank: int | None
    id: str
    node: str
    pid: int | None
    state: str
    step: int | None
    micro_batches: float | None
    micro_batch_s: float | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    replaces: str


class _DeviceState(TypedDict):
    device: str
    failures: int
    left_out: bool


_SHOWN: Mapping[str, Any] = {
    "job": str,
    "at": float,
    "node": str,
    "state": str,
    "life": int,
    "generation": int,
    "step": int | None,
    "loss": float | None,
    "until": int | None,
    "steps_per_minute": float | None,
    "remaining_s": float | None,
    "steps_lost": int,
    "redone": int,
    "plan": dict[str, Any],
    "restarts_left": int,
    "redundancy": str,
    "window": dict[str, Any] | None,
    "checkpoint": int | None,
    "checkpoint_ago_s": float | None,
    "parked": str,
    "parked_s": float | None,
    "store_away_s": float | None,
    "nodes": list[_NodeState],
    "members": list[_MemberState],
    "devices": list[_DeviceState],
    "reasons": list[str],
    "reasons_ago_s": list[float],
    "exit_code": int | None,
}


def problem_of(state: Mapping[str, Any]) -> str:
    """Return what is wrong with a state that cannot be shown, or "" if it is the state of a run."""
    for name, kind in _SHOWN.items():
        if name not in state:
            return f"it lacks {name!r}"
        try:
            msgspec.convert(state[name], kind)
        except msgspec.ValidationError as error:
            return f"{name}: {error}"
    return ""


class AskFault(Tagged, frozen=True, kw_only=True):
    """Request for a fault."""

    line: str
    """The fault, written as after `elastrain inject`; see `faults.grammar`."""
    careful_of: tuple[str, ...] | None = None
    """Members that may be lost already. The fault is refused if the job could lose state together with them."""


class AskStop(Tagged, frozen=True, kw_only=True):
    """Request to stop all nodes of the job, or only one of them."""

    drain: str = ""
    """The node that hands over and leaves, or its only member. "": all nodes stop."""


class Answer(Tagged, frozen=True, kw_only=True):
    """Answer to a request. `ok`: it was accepted. `sentence` is for the operator; `state` answers `AskState`."""

    ok: bool
    sentence: str = ""
    state: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it for each value


Request: TypeAlias = AskState | AskFault | AskStop
REQUEST: LineCodec[Request] = LineCodec(Request)
ANSWER: LineCodec[Answer] = LineCodec(Answer)


_TIMEOUT_S = 10.0
_ONE_OF_SEVERAL_S = 2.0
"""Shorter timeout in seconds if several nodes can answer, because one of them may be stopped."""
_TELL_TIMEOUT_S = 1.0


class NoAnswerError(ElastrainError):
    """Raised if the run's agent exists but does not answer, or sends no valid answer."""


def ask(run: RunDir, request: Request) -> Answer:
    """Send the request to an agent and return its answer.

    With simulated nodes, prefer a responsive agent that knows which members hold the state. Raises ConfigError if the
    run has ended, NoAnswerError if no agent answers.
    """
    for node in _best_first(rundir.nodes_of(run)):
        answer = _ask(node, request)
        if answer is not None:
            return answer
    raise _unheard(run, f"the run in {run.path} has ended: there is nothing to ask")


def _unheard(run: RunDir, if_over: str) -> ElastrainError:
    """Return the error for a run without any answering agent: its nodes are being started, or the run is over."""
    try:
        ask_launcher(run, AskState())
    except ConfigError:
        return ConfigError(if_over)
    return NoAnswerError(f"no node of {run.path} is there just now: they are being started, or the run ends; ask again")


def _best_first(nodes: Sequence[RunDir]) -> list[RunDir]:
    """Return the nodes that answer, those that know the holders of the state first.

    Stopped agents are left out, because they would carry out the request once they continue.
    """
    if len(nodes) == 1:
        return list(nodes)
    awake, stuck = list[tuple[bool, RunDir]](), None
    for node in nodes:
        try:
            answer = _ask(node, AskState(), _ONE_OF_SEVERAL_S)
            awake += [] if answer is None else [(bool(answer.state["redundancy"]), node)]
        except NoAnswerError as error:
            stuck = error
    if stuck is not None and not awake:
        raise stuck
    return [node for _, node in sorted(awake, key=lambda each: not each[0])]


def ask_launcher(run: RunDir, request: Request) -> Answer:
    """Return the answer of the launcher of simulated nodes. Raises ConfigError if there is none."""
    has_nodes = rundir.nodes_of(run)[0].whole is not None  # else the socket is that of the one agent
    answer = _ask(RunDir(path=run.path), request) if has_nodes else None
    if answer is None:
        raise ConfigError(
            f"the run in {run.path} has no launcher to ask: faults of the network and of etcd need simulated nodes "
            "(elastrain run --local-nodes N), and a run that has not ended"
        )
    return answer


def carried_around(run: RunDir) -> tuple[str, ...]:
    """Return the fault classes that the launcher of simulated nodes can carry out; empty without a launcher."""
    try:
        return tuple(ask_launcher(run, AskState()).state["carries"])
    except ConfigError:
        return ()


def tell(run: RunDir, request: Request) -> bool:
    """Send the request to the socket of exactly this folder, without waiting for an answer.

    Returns False if that fails.
    """
    sock = rundir.connect(run, _TELL_TIMEOUT_S)
    if sock is None:
        return False
    with sock:
        try:
            sock.sendall(REQUEST.encode(request))
        except OSError:
            return False
    return True


def state(run: RunDir) -> dict[str, Any]:
    """Return the state of a run, from its living agents or else from the files in its folder.

    The states of simulated nodes that answer are merged. Raises ConfigError, NoAnswerError if no node has a state.
    """
    found, stuck = list[dict[str, Any]](), None
    for node in rundir.nodes_of(run):
        try:
            told = _state(node)
            found += [] if told is None else [told]
        except NoAnswerError as error:
            stuck = error
    if not found:
        raise stuck or _unheard(run, f"{run.path} holds no readable run")
    living = [state for state in found if state["exit_code"] is None and state["state"] != "vanished"]
    # A node may still report a life that is over. Generations restart with each life, so compare lives first.
    life = max(int(state["life"]) for state in living or found)
    newest = [state for state in living or found if state["life"] == life]
    ends = [state for state in newest if state["end"] and state["end"]["job_is_over"]]  # others were told to leave
    # A spare has no workers, and so knows neither the loss nor the redundancy.
    best = max(ends or newest, key=lambda s: (s["exit_code"] or 0, int(s["generation"]), s["step"] is not None))
    return _merged(best, newest)


def _merged(whole: dict[str, Any], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `whole`, completed by each simulated node's detailed knowledge of its own workers."""
    known = {m["id"]: m for state in states for m in state["members"] if m["node"] == state["node"]}
    ranked = [known.pop(m["id"], m) | {"rank": m["rank"]} for m in whole["members"]]
    waiting = [m for m in known.values() if m["rank"] is None and m["state"] != "gone"]
    steps = [state["step"] for state in states if state["step"] is not None]
    # The node of the first member alone knows the planner's reason and the speeds.
    plan = max(
        (state["plan"] for state in states), key=lambda each: (each.get("step", -1), len(each.get("speeds", ())))
    )
    # The node of the member that collects a checkpoint alone hears of its end.
    written = max(states, key=lambda state: -1 if state["checkpoint"] is None else int(state["checkpoint"]))
    paced = max(states, key=lambda state: state["steps_per_minute"] is not None)
    parked = max(states, key=lambda state: state["parked_s"] or -1.0)
    return {
        **whole,
        **{name: parked[name] for name in ("parked", "parked_s")},
        **{name: written[name] for name in ("checkpoint", "checkpoint_ago_s")},
        **{name: paced[name] for name in ("until", "steps_per_minute", "remaining_s")},
        "store_away_s": max((s["store_away_s"] for s in states if s["store_away_s"] is not None), default=None),
        "plan": plan,
        "members": ranked + waiting,
        "step": max(steps, default=None),
        **{name: max(int(state[name]) for state in states) for name in ("steps_lost", "redone")},
    }


def _state(run: RunDir) -> dict[str, Any] | None:
    """Return the state of one node, or None if it was only just started or restarted and has no state yet."""
    answer = _ask(run, AskState(), _TIMEOUT_S if run.whole is None else _ONE_OF_SEVERAL_S)
    if answer is not None:
        return answer.state
    try:
        left = run.read_state()
    except ConfigError:  # a starting node deletes its old state and writes a new one, perhaps just now
        if not run.state.exists():
            return None
        left = run.read_state()
    # The file may be damaged or from another version, so check it before its fields are read by name.
    if problem := problem_of(left):
        raise ConfigError(f"{run.state} is not a run's state, or that of another version of elastrain: {problem}")
    if left["exit_code"] is None:  # the agent could not write its final state
        left["state"] = "vanished"
    return left


def _ask(run: RunDir, request: Request, timeout_s: float = _TIMEOUT_S) -> Answer | None:
    sock = rundir.connect(run, timeout_s)
    if sock is None:
        return None
    try:
        with sock, sock.makefile("rb") as lines:
            sock.sendall(REQUEST.encode(request))
            line = lines.readline(LINE_BYTES_MAX)
    except TimeoutError:
        raise NoAnswerError(f"the agent of {run.path} does not answer within {timeout_s:g} s") from None
    except OSError:
        return None
    try:
        return ANSWER.decode(line) if line else None
    except BadMessageError as error:
        raise NoAnswerError(f"{run.control} answers as no agent of this version does: {error}") from None
