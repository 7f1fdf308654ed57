"""Messages: what is said is what is heard, and garbage is refused with ValueError."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.checkpoint_plan import CheckpointVote, Wish
from elastrain.job.placement import Holders
from elastrain.job.streams import StreamMark
from elastrain.job.values import (
    Accusation,
    Check,
    Contribution,
    Findings,
    OpenWork,
    PlanVote,
    Record,
    Report,
    TracedGraph,
    Vote,
    Wrong,
)
from elastrain.pipeline.forward_chains import ChainStage
from elastrain.pipeline.graph import BlockGraph, CrossingTensor, IllegalCut
from elastrain.pipeline.open_tasks import TaskProgress
from elastrain.pipeline.pipeline_plan import Bound, BoundaryName, Direction, Pipeline, PipelinePlan, Task
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.pipeline.planner.step_profile import BlockSeconds
from elastrain.protocol.codec import BitMask
from elastrain.protocol.evaluation_messages import (
    BatchBoundary,
    BatchFigures,
    BlocksAdopted,
    EvaluateBatches,
    EvaluationName,
    EvaluationResult,
    InEvaluation,
    OutsideEvaluation,
)
from elastrain.protocol.messages import (
    KINDS,
    Ack,
    AskPlan,
    Boundary,
    CheckpointOver,
    Copied,
    Damaged,
    DigestReply,
    Digests,
    Doubt,
    EndsBefore,
    FetchedShard,
    FetchShard,
    GoesOn,
    Gradient,
    HasAll,
    HasTraced,
    LoopHandover,
    Message,
    Partial,
    PartReport,
    Publish,
    RepeatUpdate,
    ShardCopy,
    TakeLast,
    TellPlan,
    WriteInstead,
    decode,
    encode,
)
from elastrain.protocol.move_messages import ShadowPiece

ints = st.integers(-2, 1 << 40)
names = st.text(max_size=8)
floats = st.floats()
nodes = st.tuples(ints, ints)
evaluations = st.builds(EvaluationName, after=ints, step=ints, number=ints, from_rank=st.none() | ints)
masks = st.integers(0, 1 << 300).map(BitMask)


def tuples(items: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=3).map(tuple)


sums = st.dictionaries(names, floats, max_size=3).map(lambda told: tuple(sorted(told.items())))
contributions = st.builds(Contribution, floats, floats, ints, st.integers(0, (1 << 64) - 1), sums)
holders = st.builds(Holders, names, st.lists(names, max_size=2).map(tuple))
roles = tuples(st.tuples(ints, holders))
boundary_names = st.builds(BoundaryName, ints, ints, ints, st.sampled_from(Direction))
crossing = st.builds(
    CrossingTensor, shape=tuples(ints), stride=tuples(ints), dtype=names, itemsize=ints, requires_grad=st.booleans()
)
graphs = st.builds(
    BlockGraph,
    blocks=st.tuples(names),
    flops=st.tuples(ints),
    crossings=st.tuples(st.just(()), tuples(crossing)),
    illegal=tuples(st.builds(IllegalCut, cut=ints, why=names)),
    never_entered=tuples(st.tuples(names, names)),
)
tasks = st.builds(Task, ints, ints, ints, names)
lines = tuples(
    st.builds(Pipeline, members=st.tuples(names), cuts=st.just(()), share=ints, limits=st.tuples(ints))
    | st.builds(
        Pipeline,
        members=st.just(("a", "b", "c")),
        cuts=st.just((2, Bound(5, 6, 3, 10, 4))),
        share=ints,
        limits=st.tuples(ints, ints, ints),
    )
)
plans = st.builds(PipelinePlan, blocks=ints, pipelines=lines, coming=lines, named=ints)
block_seconds = st.builds(BlockSeconds, forward_s=floats, input_gradient_s=floats, weight_gradient_s=floats)
records = st.builds(
    Record,
    step=ints,
    generation=ints,
    contribution=contributions,
    square_norm=floats,
    skipped=st.booleans(),
    switch=st.booleans(),
    roles=roles,
    plan=st.none() | names | plans,
    findings=st.builds(Findings, speeds=tuples(st.tuples(names, ints))),
)
MESSAGES: dict[type, st.SearchStrategy[Message]] = {
    Report: st.builds(
        Report,
        committed=ints,
        record=st.none() | records,
        base=st.none() | tuples(holders),
        parameters=tuples(ints),
        held=tuples(st.tuples(ints, ints, tuples(ints))),
        begun=ints,
        finishing=st.booleans(),
        work=st.builds(
            OpenWork,
            pending=tuples(ints),
            fixed=ints,
            traced=st.none() | st.builds(TracedGraph, graph=graphs, places=tuples(ints), fewest=ints),
            tasks=tuples(
                st.builds(
                    TaskProgress,
                    task=st.builds(Task, ints, ints, ints, names),
                    forwarded=ints,
                    passed_back=ints,
                    done=ints,
                )
            ),
            kept=tuples(boundary_names),
            adopted=tuples(ints),
            plan=st.none() | plans,
            present=tuples(ints),
        ),
        own=tuples(tuples(nodes)),
        folded=tuples(st.tuples(ints, ints, tuples(nodes))),
        wrong=st.none()
        | st.builds(
            Wrong,
            parameters=tuples(st.tuples(ints, names)),
            accused=tuples(st.builds(Accusation, ints, names, names)),
        ),
    ),
    Partial: st.builds(
        Partial, step=ints, block=ints, node=nodes, contribution=contributions, touched=masks, lanes=tuples(nodes)
    ),
    Gradient: st.builds(
        Gradient,
        step=ints,
        shards=tuples(ints),
        contribution=contributions,
        touched=tuples(tuples(masks)),
        square_norms=tuples(floats),
    ),
    Ack: st.builds(Ack, step=ints, shards=tuples(ints)),
    Vote: st.builds(
        Vote,
        step=ints,
        seen=ints,
        contribution=st.none() | contributions,
        square_norms=tuples(st.tuples(ints, floats)),
        roles=roles,
        settings=names,
        checks=tuples(st.builds(Check, micro_batch=ints, loss=floats, weight=floats, digests=tuples(ints))),
        before=tuples(st.builds(Check, micro_batch=ints, loss=floats, weight=floats, digests=tuples(ints))),
        checkpoint=st.builds(CheckpointVote, st.sampled_from(Wish), st.booleans()),
        graph=names,
        plan=st.none()
        | st.builds(
            PlanVote,
            proposed=st.none() | plans,
            seconds=tuples(st.tuples(ints, block_seconds)),
            rates=tuples(st.tuples(names, floats)),
            memory=st.none() | st.builds(ToldMemory, limit_bytes=ints, base_bytes=ints, taken_bytes=ints),
            micro_batch_s=st.none() | floats,
            is_full=st.booleans(),
        ),
        marks=tuples(st.builds(StreamMark, stream=ints, position=ints, state=names, digest=names)),
    ),
    Boundary: st.builds(
        Boundary, name=boundary_names, tensors=tuples(st.none() | crossing), contribution=st.none() | contributions
    ),
    Publish: st.builds(Publish, step=ints, record=st.none() | records, shards=tuples(ints)),
    Digests: st.builds(Digests, step=ints, digests=tuples(nodes), parameters=tuples(nodes)),
    ShardCopy: st.builds(ShardCopy, step=ints, shard=ints, digest=st.none() | ints, part=st.tuples(ints, ints)),
    Copied: st.builds(Copied, step=ints, shard=ints, intact=st.booleans(), refused=tuples(ints)),
    Doubt: st.builds(Doubt, step=ints, shard=ints, parameters=st.booleans()),
    DigestReply: st.builds(
        DigestReply, step=ints, shard=ints, parameters=st.booleans(), digest=st.none() | ints, is_trial=st.booleans()
    ),
    RepeatUpdate: st.builds(RepeatUpdate, step=ints, shard=ints, touched=tuples(masks)),
    Damaged: st.builds(Damaged, step=ints, block=ints, node=nodes, shard=ints),
    AskPlan: st.builds(AskPlan, digest=names),
    TellPlan: st.builds(TellPlan, plan=plans),
    ShadowPiece: st.builds(ShadowPiece, step=ints, shard=ints, part=st.tuples(ints, ints)),
    FetchShard: st.builds(FetchShard, step=ints, shard=ints),
    FetchedShard: st.builds(FetchedShard, step=ints, shard=ints, digest=st.none() | ints),
    LoopHandover: st.builds(LoopHandover, step=ints, state=names),
    PartReport: st.builds(
        PartReport,
        step=ints,
        shards=st.lists(ints, max_size=3).map(tuple),
        told=st.lists(names, max_size=3).map(tuple),
        lacking=st.lists(ints, max_size=3).map(tuple),
        problem=names,
    ),
    WriteInstead: st.builds(WriteInstead, step=ints, shards=st.lists(ints, max_size=3).map(tuple)),
    CheckpointOver: st.builds(CheckpointOver, step=ints, reason=names, told=names),
    EndsBefore: st.builds(EndsBefore, step=ints, is_checkpoint_wished=st.booleans()),
    TakeLast: st.builds(TakeLast, step=ints),
    HasAll: st.builds(HasAll, step=ints),
    HasTraced: st.builds(HasTraced, graph=graphs, fewest=ints),
    GoesOn: st.builds(GoesOn, step=ints),
    InEvaluation: st.builds(
        InEvaluation, name=evaluations, plan=names, batches=ints, done=tuples(st.tuples(ints, names, names))
    ),
    EvaluateBatches: st.builds(
        EvaluateBatches,
        name=evaluations,
        batches=tuples(ints),
        chain=tuples(st.builds(ChainStage, names, ints, ints)),
        over=tuples(ints),
    ),
    BlocksAdopted: st.builds(BlocksAdopted, name=evaluations, places=tuples(ints)),
    BatchBoundary: st.builds(
        BatchBoundary, name=evaluations, batch=ints, cut=ints, tensors=tuples(st.none() | crossing)
    ),
    BatchFigures: st.builds(BatchFigures, name=evaluations, batch=ints, figures=names, problem=names),
    EvaluationResult: st.builds(EvaluationResult, name=evaluations, figures=names, problem=names),
    OutsideEvaluation: st.builds(OutsideEvaluation, name=evaluations),
}
any_values = st.recursive(
    st.none() | st.booleans() | ints | floats | st.binary(max_size=4) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def test_every_kind_of_message_is_tried_here() -> None:
    assert set(MESSAGES) == set(KINDS)


@pytest.mark.parametrize("kind", sorted(KINDS, key=str), ids=str)
@given(data=st.data())
def test_what_is_said_is_what_is_heard(kind: type, data: st.DataObject) -> None:
    message = data.draw(MESSAGES[kind])
    number, body = encode(message)
    heard = decode(number, body)
    assert type(heard) is kind
    assert repr(heard) == repr(message)  # repr: a NaN is equal to itself here, and floats are written exactly


@given(kind=st.integers(-1, 20), body=st.binary(max_size=40))
def test_bytes_that_are_no_message_raise_value_error(kind: int, body: bytes) -> None:
    refuses_or_reads(lambda: decode(kind, body))


@given(kind=st.sampled_from(sorted(KINDS.values())), value=any_values)
def test_values_that_are_no_message_raise_value_error(kind: int, value: object) -> None:
    refuses_or_reads(lambda: decode(kind, msgspec.msgpack.encode(value)))


@given(data=st.data())
def test_a_message_with_a_damaged_field_raises_value_error_or_is_read(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS, key=lambda k: k.__name__)))
    number, body = encode(data.draw(MESSAGES[kind]))
    fields = msgspec.msgpack.decode(body)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(any_values)
    refuses_or_reads(lambda: decode(number, msgspec.msgpack.encode(fields)))


@given(data=st.data())
def test_a_message_that_lacks_a_field_is_refused(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS, key=lambda k: k.__name__)))
    number, body = encode(data.draw(MESSAGES[kind]))
    fields = msgspec.msgpack.decode(body)
    needed = {each.name for each in dataclasses.fields(kind) if each.default is dataclasses.MISSING}
    del fields[data.draw(st.sampled_from(sorted(needed & fields.keys())))]
    with pytest.raises(ValueError, match="malformed"):
        decode(number, msgspec.msgpack.encode(fields))


def refuses_or_reads(read: Callable[[], Message]) -> None:
    try:
        message = read()
    except ValueError:
        return
    assert type(message) in KINDS


@given(parts=st.lists(contributions, min_size=1, max_size=4))
def test_counts_and_fingerprints_add_up_in_any_order(parts: list[Contribution]) -> None:
    forward, backward = Contribution(), Contribution()
    for part in parts:
        forward = forward + part
    for part in reversed(parts):
        backward = part + backward
    assert (forward.samples, forward.fingerprint) == (backward.samples, backward.fingerprint)
    assert 0 <= forward.fingerprint < 1 << 64
    named = {name for part in parts for name, _ in part.sums}
    assert [name for name, _ in forward.sums] == [name for name, _ in backward.sums] == sorted(named)
