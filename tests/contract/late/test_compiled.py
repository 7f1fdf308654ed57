"""A program that torch.compile has built has the bits on the device that it has on the CPU, also with attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract.late.models import images, train
from tests.contract.late.test_bits import assert_equal_bits
from tests.support import late

PROGRAMS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "convolutions": {"make": images},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
    "convolutions with autocast": {"make": images, "autocast": torch.bfloat16},
    "fp16 with scaler": {"autocast": torch.float16, "scaled": True},
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_program_has_the_bits_of_the_cpu(program: str, backend: str) -> None:
    late.keep_from_compiler()
    on_cpu, on_device = (train(device, compiled=backend, **PROGRAMS[program]) for device in ("cpu", "late"))
    assert_equal_bits(on_device, on_cpu)
    assert late.races() == []


def test_traced_dropout_rounds_otherwise_than_the_plain_one_on_both_devices() -> None:
    late.keep_from_compiler()
    program = PROGRAMS["bf16"]
    for device in ("cpu", "late"):
        plain, compiled = train(device, **program), train(device, compiled="aot_eager", **program)
        with pytest.raises(AssertionError, match="number"):
            assert_equal_bits(compiled, plain)


def _attention(device: str, mask: str, *, is_compiled: bool) -> list[Tensor]:
    """Return the output of an attention layer and the gradients of its inputs."""
    torch.manual_seed(3)
    drawn = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    masks = {"boolean": torch.randn(5, 5) > -1, "float": torch.randn(2, 1, 5, 5)}
    given = {"attn_mask": masks[mask].to(device)} if mask in masks else {}
    inputs = [each.to(device).requires_grad_() for each in drawn]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", **given)

    out = (torch.compile(attend, backend="aot_eager") if is_compiled else attend)(*inputs)
    out.square().sum().backward()
    return [out, *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("mask", ["causal", "none", "boolean", "float"])
def test_compiled_attention_takes_the_kernel_that_the_plain_one_takes(mask: str) -> None:
    late.keep_from_compiler()
    torch._dynamo.reset()
    compiled = _attention("late", mask, is_compiled=True)
    assert_equal_bits(compiled, _attention("late", mask, is_compiled=False))
    assert_equal_bits(compiled, _attention("cpu", mask, is_compiled=True))
