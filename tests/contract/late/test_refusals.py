"""Arguments that lie on two devices, and what else CUDA refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import late


def far(*shape: int) -> Tensor:
    return torch.ones(shape, device="late")


REFUSED: dict[str, Callable[[], object]] = {
    "a matrix on the CPU": lambda: far(2, 2) @ torch.ones(2, 2),
    "a vector on the CPU": lambda: far(2) + torch.ones(2),
    "a number on the device with a vector on the CPU": lambda: torch.ones(2) + far(),
    "a result on the CPU": lambda: torch.add(far(2), far(2), out=torch.empty(2)),
    "a tensor on the CPU that is changed": lambda: torch.ones(()).add_(far()),
    "index_select with an index on the CPU": lambda: far(4).index_select(0, torch.tensor([1])),
    "gather with an index on the CPU": lambda: far(4).gather(0, torch.tensor([1])),
    "take with an index on the CPU": lambda: far(4).take(torch.tensor([1])),
    "scatter with an index on the CPU": lambda: far(4).scatter_(0, torch.tensor([1]), 2.0),
    "index_add_ with an index on the CPU": lambda: far(4).index_add_(0, torch.tensor([1]), far(1)),
    "an embedding of words on the CPU": lambda: F.embedding(torch.tensor([1]), far(4, 2)),
    "an index on the device into a tensor on the CPU": lambda: torch.ones(4)[torch.tensor([1], device="late")],
    "targets on the CPU": lambda: F.cross_entropy(far(2, 3), torch.tensor([0, 1])),
    "a weight of a layer norm on the CPU": lambda: F.layer_norm(far(2, 3), (3,), torch.ones(3)),
    "a list with a tensor on the CPU": lambda: torch.cat([far(2), torch.ones(2)]),
    "a list with a number on the CPU, where no kernel takes it": lambda: torch.stack([far(), torch.ones(())]),
    "a matrix times a number on the CPU, of mm": lambda: torch.mm(far(1, 1), torch.ones(1, 1)),
    "steps of a fused optimizer on the CPU": lambda: torch._fused_adamw_(
        *[[far(2)] for _ in range(4)],
        [],
        [torch.ones(())],
        lr=0.1,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    ),
}
TAKEN: dict[str, Callable[[], Any]] = {
    "a number on the CPU": lambda: far(2) * torch.tensor(2.0),
    "a number on the CPU, before": lambda: torch.tensor(2.0) - far(2),
    "a number on the CPU, in place": lambda: far(2).add_(torch.tensor(2.0)),
    "a number on the CPU, of where": lambda: torch.where(far(2) > 0, far(2), torch.tensor(2.0)),
    "a number on the CPU, of lerp": lambda: torch.lerp(far(2), far(2), torch.tensor(0.5)),
    "an index on the CPU": lambda: far(4)[torch.tensor([1, 2])],
    "a mask on the CPU": lambda: far(2)[torch.tensor([True, True])],
    "a value put at an index on the CPU": lambda: far(2).index_put_((torch.tensor([1]),), torch.tensor(1.0)),
    "a Python number": lambda: far(2).masked_fill(far(2) > 3, 2.0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_on_two_devices_are_refused(case: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"same device, but found .* late:0 and cpu! .* argument \w+ in method aten::"
    ):
        REFUSED[case]()


@pytest.mark.parametrize("case", TAKEN)
def test_what_cuda_takes_is_taken(case: str) -> None:
    made = TAKEN[case]()
    assert made.device.type == "late" and made.shape == (2,)


def test_an_index_on_the_cpu_costs_a_wait() -> None:
    values = far(4)
    before = late.stats()["waits"]
    values[torch.tensor([1, 2], device="late")]
    between = late.stats()["waits"]
    values[torch.tensor([1, 2])]
    assert (between - before, late.stats()["waits"] - between) == (1, 1), "the first is the upload of the index"


def test_a_generator_of_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'late' device type for generator but found 'cpu'"):
        far(2).normal_(generator=torch.Generator())
    far(2).normal_(generator=torch.late.default_generators[0])  # type: ignore[attr-defined]


def test_a_child_that_was_forked_after_the_device_was_used_may_not_use_it() -> None:
    values = far(2)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            values.add_(1)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert b"Cannot re-initialize LATE in forked subprocess" in os.read(read, 1000)
    os.close(read)


def test_other_devices_and_sparse_tensors_are_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.late.set_device(1)  # type: ignore[attr-defined]
    with pytest.raises((NotImplementedError, RuntimeError)):
        far(2, 2).to_sparse()
