"""Messages, by example."""

from __future__ import annotations

import math

import msgspec
import pytest

from elastrain.job.checkpoint_plan import CheckpointVote
from elastrain.job.placement import Holders
from elastrain.job.values import Contribution, Record, Vote
from elastrain.protocol.messages import KINDS, Ack, EndsBefore, Publish, decode, encode


def test_a_commit_record_travels_whole_with_infinite_and_missing_numbers() -> None:
    record = Record(
        step=3,
        generation=2,
        contribution=Contribution(math.nan, 2.0, 4, (1 << 64) - 1),
        square_norm=math.inf,
        skipped=True,
        switch=False,
        roles=((1, Holders("a", ("b", "c"))),),
    )
    heard = decode(*encode(Publish(step=3, record=record, shards=(0, 1))))
    assert isinstance(heard, Publish) and heard.record is not None
    assert math.isnan(heard.record.contribution.loss)
    assert heard.record.square_norm == math.inf
    assert heard.record.roles == record.roles


def test_the_smallest_difference_of_a_float_survives() -> None:
    loss = math.nextafter(0.1, 1.0)
    vote = Vote(
        step=0,
        seen=1,
        contribution=Contribution(loss),
        square_norms=((0, 5e-324),),
        roles=(),
        settings="",
        checks=(),
        before=(),
        checkpoint=CheckpointVote(),
        graph="",
        plan=None,
    )
    assert decode(*encode(vote)) == vote


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (99, b"\x80", "kind 99 is unknown"),
        (KINDS[EndsBefore], msgspec.msgpack.encode([]), "malformed EndsBefore"),
        (KINDS[Ack], msgspec.msgpack.encode({}), "malformed Ack"),
        (KINDS[EndsBefore], b"", "malformed EndsBefore"),
        (KINDS[EndsBefore], b"\xff\xfe\xff", "malformed EndsBefore"),
        (KINDS[EndsBefore], b"\x91" * 100_000, "malformed EndsBefore"),
        (KINDS[EndsBefore], msgspec.msgpack.encode({"step": True}), r"Expected `int`, got `bool` - at `\$.step`"),
        (
            KINDS[Ack],
            msgspec.msgpack.encode({"step": 1, "shards": [1.5]}),
            r"Expected `int`, got `float` - at `\$.shards",
        ),
        (KINDS[Vote], msgspec.msgpack.encode({"contribution": 1}), "malformed Vote"),
        (KINDS[Vote], msgspec.msgpack.encode({"roles": [[0, {"primary": "a"}]]}), "malformed Vote"),
    ],
    ids=["kind", "list", "lacking", "empty", "bytes", "deep", "bool", "float", "contribution", "roles"],
)
def test_what_is_no_message_is_refused(kind: int, body: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode(kind, body)


def test_contributions_add_and_fingerprints_wrap() -> None:
    whole = Contribution(1.0, 2.0, 3, (1 << 64) - 1) + Contribution(0.5, 1.0, 1, 2)
    assert whole == Contribution(1.5, 3.0, 4, 1)
