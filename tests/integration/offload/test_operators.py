"""Every differentiable operator of the installed torch: the gradients of its samples are the same with offload.

The samples are torch's own (`op_db`). Where an operator fills an argument after autograd has saved it, a copy that is
made too early shows here: the drive takes each write at once, before the operator can go on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from elastrain.offload import ActivationOffload, OffloadConfig
from elastrain.offload.activations.forward_spills import Operator, running_operator
from elastrain.offload.activations.manager import SpillManager
from elastrain.offload.activations.pass_records import SpillRecord
from elastrain.offload.drives.residency import State
from tests.support.memory_engine import MemoryEngine

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

SAMPLES = 2
RANDOM_BY_ITSELF = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
# Backward uses what these fill after it was saved:
NOISE_IS_FILLED_LATE = {"nn_functional_rrelu"}
# and of these only the running statistics are, which backward in training does not use.
STATISTICS_ARE_FILLED_LATE = {
    "nn_functional_batch_norm",
    "nn_functional_instance_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
}


@cache
def operators() -> list[OpInfo]:
    # To import the list takes seconds, in each process that collects tests.
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op
        for op in op_db
        if op.supports_autograd and op.supports_dtype(torch.float32, "cpu") and op.name not in RANDOM_BY_ITSELF
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def offload() -> Iterator[ActivationOffload]:
    made = ActivationOffload(OffloadConfig(dirs=("/",), min_bytes=1, deadline_s=20.0), engines=[MemoryEngine()])
    yield made
    made.close()


def samples_of(op: OpInfo) -> list[SampleInput]:
    """The first ones. `op.sample_inputs` would look for its unittest in the whole stack, at each operator."""
    seed(0)
    return list(islice(op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=True), SAMPLES))


def seed(value: int) -> None:
    """`torch.manual_seed` notes the whole stack for each kind of accelerator, for ever: most of the time of a call."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def tensors_in(value: object) -> list[Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]


def gradients(op: OpInfo, sample: SampleInput, around: Callable[[Callable[[], Any]], Any]) -> list[Tensor] | str:
    """Those of all inputs, through copies of them that the operator may change; or the name of the error."""
    leaves = [each for each in tensors_in((sample.input, sample.args, sample.kwargs)) if each.requires_grad]
    seed(1)
    try:
        results = around(lambda: op(sample.input, *sample.args, **sample.kwargs))
        used = [each for each in tensors_in(results) if each.requires_grad]
        if not used or not leaves:
            return []
        found = torch.autograd.grad(used, leaves, [torch.ones_like(each) for each in used], allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    return [each for each in found if each is not None]


def same(a: list[Tensor] | str, b: list[Tensor] | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return len(a) == len(b) and all(
        x.layout != torch.strided or torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True)
    )


def everything_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive is as fast as can be: what may leave has left before the hook comes back to the operator."""
    save = SpillManager.save

    def save_and_wait(self: SpillManager, record: SpillRecord, *args: Any) -> None:
        save(self, record, *args)
        deadline_s = time.monotonic() + 20.0
        with self._lock:
            while record.state is State.WRITING:
                assert time.monotonic() < deadline_s
                self._lock.wait()

    monkeypatch.setattr(SpillManager, "save", save_and_wait)


@pytest.mark.timeout(1200)  # half a minute of a quiet core; a loaded machine takes its time
def test_every_operator_has_the_gradients_that_it_has_without(
    offload: ActivationOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_is_written_at_once(monkeypatch)

    def with_offload(call: Callable[[], Any]) -> Any:
        with offload:
            return call()

    compared, differ = 0, []
    for op in operators():
        for sample in samples_of(op):
            expected = gradients(op, sample, lambda call: call())
            if not same(expected, gradients(op, sample, lambda call: call())):
                continue  # random by itself
            compared += isinstance(expected, list)
            if not same(expected, gradients(op, sample, with_offload)):
                differ.append(op.formatted_name)
    assert compared > 800
    assert differ == []
    assert offload.stats().spilled_bytes > 0


def test_which_operators_fill_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the installed torch, by looking: what is in memory when it is saved, and when the operator has returned."""
    fill_late = set()
    waiting: list[tuple[Operator, Tensor, bytes]] = []

    def bytes_of(tensor: Tensor) -> bytes:
        return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    def look(running: Operator | None) -> None:
        returned = [each for each in waiting if each[0] != running]
        waiting[:] = [each for each in waiting if each[0] == running]
        if any(bytes_of(tensor) != before for _, tensor, before in returned):
            fill_late.add(op.formatted_name)

    def pack(tensor: Tensor) -> Tensor:
        running = running_operator()
        look(running)
        if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel():
            tensor = tensor.detach().resolve_conj().resolve_neg()
            waiting.append((running, tensor, bytes_of(tensor)))
        return tensor

    for op in operators():
        for sample in samples_of(op):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved), suppress(RuntimeError):
                op(sample.input, *sample.args, **sample.kwargs)
            look(None)
    assert fill_late - STATISTICS_ARE_FILLED_LATE == NOISE_IS_FILLED_LATE, "torch has one more: is it in the gradients?"
