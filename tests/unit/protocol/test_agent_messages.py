"""Worker and agent: every kind is encoded by its sender's code and read by its receiver's; nonsense is named."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.world import Member, View
from elastrain.launcher.shared import notices, operator_messages
from elastrain.launcher.shared.line_socket import LineSocket as AgentsEnd
from elastrain.protocol import agent_messages as am
from elastrain.protocol.codec import LINE_BYTES_MAX, BadMessageError, LineCodec, Tagged
from elastrain.runtime.io import agent_link as workers_end
from tests.support.sources import ROOT

FROM_WORKER: list[am.FromWorker] = [
    am.Hello(member="m0", address="unix:x", spec={"seed": 0, "loss_scale": "none", "max_grad_norm": 1.0}),
    am.Suspect(member="m1", reason="reset"),
    am.SharesChanged(step=4, reason="m1 is slow"),
    am.Redone(generation=3, step=4, pairs=12),
    am.PlanTold(step=4, pipelines=({"runs": 2, "blocks": {"m0": [0, 8]}, "limits": [1]},), reason="members have come"),
    am.PlanTold(reason="no block moves", speeds={"m0": 0.5}),
    am.WaitReason(step=4, reason="no vote of m1 yet"),
    am.Window(step=4, short={"0": 1, "7": 2}, since_step=3),
    am.Suspect(member="m1", reason="ended", dead=True),
    am.StepAnew(generation=3, reason="a gradient came changed"),
    am.Reading(done_bytes=1, size_bytes=9),
    am.FirstCommitDue(),
    am.Progress(step=3, loss=0.1, samples=8),
    am.Progress(step=3, holders={"0": ("m0", "m1")}),
    am.WorkTold(until=9, micro_batches=2.5, memory_bytes=7, memory_limit_bytes=8),
    am.OnDevice(device="GPU, UUID a", seen=("GPU, UUID a", "GPU, UUID b")),
    am.Failed(step=3, micro_batch=None, signature="E", traceback="TB"),
    am.Failed(step=3, micro_batch=None, signature="E", traceback="TB", device="GPU, UUID a"),
    am.LostState(sentence="gone"),
    am.Diverged(sentence="differs"),
    am.NoRoom(sentence="12 MiB too small"),
    am.Finished(step=9, digest="d"),
    am.Finished(step=9, digest="d", raised=True),
    am.Struck(number=3),
    am.CheckpointReady(step=3, name="life-0001-step-0000000003", size_bytes=9),
    am.CheckpointEnded(step=3, size_bytes=9, took_s=0.5, reason="no space"),
    am.Note(fields={"noticed": "x"}),
]
MEMBERS = (Member(id="m0", node="a", address="tcp:a:1", incarnation=2), Member(id="m1", node="b"))
TO_WORKER: list[am.ToWorker] = [
    am.NewView(view=View(generation=2, members=MEMBERS, reason="m2 was lost", begun=True)),
    am.FirstCommitAllowed(),
    am.EndReached(),
    am.ArmFault(kind="slow", step=4, phase=None, for_s=2.5, options={"factor": 3.0, "how": "busy"}, number=3),
    am.Drain(),
    am.CheckpointSettled(step=3, problem=""),
    am.WriteLast(),
    am.Refused(reason="seed"),
    am.Stop(reason="finished"),
]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[workers_end.Channel, AgentsEnd]]:
    """A worker's and an agent's end of one channel."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0elastrain/test-agent-messages")
    listener.listen()
    monkeypatch.setattr(workers_end, "dial", lambda *_, **__: None)  # the handshake has tests of its own
    worker = workers_end.Channel("elastrain/test-agent-messages", secret=None, job="j", member="m0")
    agent = AgentsEnd(listener.accept()[0])
    yield worker, agent
    worker.close()
    agent.close()
    listener.close()


def test_every_kind_is_tried_here() -> None:
    assert {type(message) for message in FROM_WORKER} == set(get_args(am.FromWorker))
    assert {type(message) for message in TO_WORKER} == set(get_args(am.ToWorker))


def test_what_a_worker_sends_its_agent_reads(ends: tuple[workers_end.Channel, AgentsEnd]) -> None:
    worker, agent = ends
    for message in FROM_WORKER:
        worker.send(message)
    assert [am.FROM_WORKER.decode(line) for line in agent.receive().lines] == FROM_WORKER


def test_what_an_agent_sends_its_worker_reads(ends: tuple[workers_end.Channel, AgentsEnd]) -> None:
    worker, agent = ends
    for message in TO_WORKER:
        assert agent.send(am.TO_WORKER.encode(message))
    heard = worker.receive()
    assert heard == TO_WORKER
    assert isinstance(heard[0], am.NewView)
    assert (heard[0].view.reason, heard[0].view.begun) == ("m2 was lost", True)


def test_a_worker_takes_leave_of_an_agent_that_talks_nonsense(ends: tuple[workers_end.Channel, AgentsEnd]) -> None:
    worker, agent = ends
    assert agent.send(b"{]\n")
    with pytest.raises(workers_end.ChannelClosedError, match="what no agent sends"):
        worker.receive()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{]", "not a line of JSON"),
        (b"\xff", "not a line of JSON"),
        (b"", "not a line of JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `type`"),
        (b'{"type": "Shout"}', "Invalid value 'Shout'"),
        (b'{"type": "Finished", "step": 1}', "missing required field `digest`"),
        (b'{"type": "Finished", "step": "1", "digest": "x"}', "Expected `int`, got `str` - at `$.step`"),
        (b'{"type": "Finished", "step": true, "digest": "x"}', "Expected `int`, got `bool` - at `$.step`"),
        (b'{"type": "Finished", "step": 1, "digest": "x", "y": 1}', "unknown field `y`"),
        (b'{"type": "Progress", "step": 1, "holders": {"0": "m0"}}', "Expected `array`, got `str`"),
        (b'{"type": "Hello", "member": "m0", "address": "", "spec": 3}', "Expected `object`, got `int` - at `$.spec`"),
        (b'{"type": "Hello", "member": "\xff", "address": "", "spec": {}}', "not a line of JSON"),
        (b'{"type": "Hello", "member": "m0", "address": "", "spec": {"a": ' + b"[" * 100_000, "not a line of JSON"),
    ],
)
def test_nonsense_is_named(line: bytes, problem: str) -> None:
    with pytest.raises(BadMessageError, match=re.escape(problem)):
        am.FROM_WORKER.decode(line)


def test_a_view_that_names_a_member_twice_is_refused() -> None:
    twice = json.dumps([{"id": "a", "node": "n"}] * 2)
    line = f'{{"type": "NewView", "view": {{"generation": 1, "members": {twice}}}}}'
    with pytest.raises(BadMessageError, match="names each member once"):
        am.TO_WORKER.decode(line.encode())


def test_what_subclasses_a_plain_value_is_sent_as_one_and_other_things_are_refused() -> None:
    """torch.__version__ is a str of its own kind."""

    class Version(str): ...

    hello = am.Hello(member="m0", address="", spec={"torch": Version("2"), "clip": np.float64(0.5)})
    assert am.FROM_WORKER.decode(am.FROM_WORKER.encode(hello)) == hello
    with pytest.raises(TypeError, match="a lock has no place in a message"):
        am.FROM_WORKER.encode(am.Note(fields={"x": threading.Lock()}))


def test_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        am.FROM_WORKER.encode(am.Note(fields={"x": "x" * LINE_BYTES_MAX}))


CODECS: list[LineCodec[object]] = [
    am.FROM_WORKER,
    am.TO_WORKER,
    notices.NOTICE,
    operator_messages.REQUEST,
    operator_messages.ANSWER,
]  # type: ignore[list-item]  # a codec of fewer kinds is one of object here
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(codec=st.sampled_from(CODECS), line=st.binary(max_size=60))
def test_bytes_are_read_or_refused(codec: LineCodec[object], line: bytes) -> None:
    with suppress(BadMessageError):
        codec.decode(line)


@given(message=st.sampled_from([*FROM_WORKER, *TO_WORKER]), value=json_values, data=st.data())
def test_a_message_with_a_damaged_field_is_read_or_refused(message: Tagged, value: object, data: st.DataObject) -> None:
    codec = am.FROM_WORKER if message in FROM_WORKER else am.TO_WORKER
    fields = json.loads(codec.encode(message))  # type: ignore[arg-type]  # either codec knows it
    fields[data.draw(st.sampled_from(sorted(fields)))] = value
    with suppress(BadMessageError):
        codec.decode(json.dumps(fields).encode())


RECEIVERS = {
    am.FromWorker: "launcher",
    am.ToWorker: "elastrain/runtime",
    notices.Notice: "launcher",
    operator_messages.Request: "launcher",
    operator_messages.Answer: "launcher",
}


@pytest.mark.parametrize(
    ("kind", "folder"),
    [(kind, folder) for union, folder in RECEIVERS.items() for kind in get_args(union) or (union,)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_field_has_a_reader(kind: type[Tagged], folder: str) -> None:
    """Somewhere at the receiver's end `.field` (or a pattern `field=`) is read."""
    text = "\n".join(path.read_text() for path in (ROOT / folder).rglob("*.py"))
    for field in kind.__struct_fields__:
        assert re.search(rf"\.{field}\b|{kind.__name__}\({field}=", text), f"nobody reads {kind.__name__}.{field}"
