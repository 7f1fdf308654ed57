"""Everything that a program computes on the device has the bits that it has on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.late.models import images, text, train
from tests.support import late

PROGRAMS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "convolutions": {"make": images},
    "bf16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
    "convolutions with autocast": {"make": images, "autocast": torch.bfloat16},
    "fp16 with scaler": {"autocast": torch.float16, "scaled": True},
    "checkpointing": {"make": functools.partial(text, recomputes=True)},
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)},
    "adamw": {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)},
}


def assert_equal_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        if mine.numel():
            assert torch.equal(_bytes(mine), _bytes(other)), f"number {number}: {mine} is not {other}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_bits_of_the_cpu(program: str) -> None:
    on_cpu, on_device = (train(device, **PROGRAMS[program]) for device in ("cpu", "late"))
    assert_equal_bits(on_device, on_cpu)
    assert late.races() == []


def _attention(
    mask: str, dtype: torch.dtype, scale: float | None = None
) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    def compute(to: Callable[[Tensor], Tensor]) -> Tensor:
        q, k, v = (to(torch.randn(2, 3, 5, 8, dtype=dtype)).requires_grad_() for _ in range(3))
        masks = {"boolean": torch.randn(5, 5) > -1, "float": torch.randn(2, 1, 5, 5, dtype=dtype)}
        given = {"attn_mask": to(masks[mask])} if mask in masks else {}
        out = F.scaled_dot_product_attention(q, k, v, is_causal=mask == "causal", scale=scale, **given)
        out.square().sum().backward()
        return torch.cat([each.flatten() for each in (out, q.grad, k.grad, v.grad)])

    return compute


def _with_grad(function: Callable[..., Tensor], *shape: int) -> Callable[[Callable[[Tensor], Tensor]], Tensor]:
    def compute(to: Callable[[Tensor], Tensor]) -> Tensor:
        x = to(torch.randn(*shape)).requires_grad_()
        out = function(x)
        out.sum().backward()
        return torch.cat([out.flatten(), x.grad.flatten()])

    return compute


def _embedding(to: Callable[[Tensor], Tensor]) -> Tensor:
    weight, index = to(torch.randn(11, 7)).requires_grad_(), to(torch.randint(11, (5, 9)))
    (F.embedding(index, weight, padding_idx=3) * to(torch.randn(5, 9, 7))).sum().backward()
    return weight.grad


def _draws(to: Callable[[Tensor], Tensor]) -> Tensor:
    x = to(torch.zeros(64))
    drawn = [torch.randn_like(x), torch.rand_like(x), x.uniform_(), torch.bernoulli(x), x.normal_(), x.exponential_()]
    drawn += [torch.randn(64, device=x.device), torch.rand(64, device=x.device)]
    numbers = [torch.randperm(64, device=x.device), torch.randint(9, (64,), device=x.device)]
    return torch.cat([*drawn, *(each.float() for each in numbers), torch.multinomial(x.abs(), 8).float()])


def _indexing(to: Callable[[Tensor], Tensor]) -> Tensor:
    x, index = to(torch.randn(9, 9)), to(torch.randint(9, (6,)))
    x[index, 2] += 1.5
    x[x > 1] = 0
    x.index_add_(0, index, to(torch.randn(6, 9)))
    found = [x[index], x.gather(1, index.expand(9, 6)), x[x.abs() > 1], x.sort().values, x.topk(3).values, x.cumsum(0)]
    return torch.cat([*(each.flatten() for each in found), x.nonzero().float().flatten()])


def _arithmetic(to: Callable[[Tensor], Tensor]) -> Tensor:
    x, y = to(torch.randn(17, 9)), to(torch.rand(17, 9))
    one = to(torch.tensor(0.3))
    made = [x + y, 2 - x, x / 3, x**2, y**0.5, x @ y.T, torch.where(x > 0, x, 0.1), torch.lerp(x, y, 0.3), one * 2.5]
    made += [torch.where(one > 0, one, 0.1), x.std(0), x.var(), x.mean(1), x.norm(), x.softmax(1), x.logsumexp(0)]
    made += [
        torch.addcmul(x, x, y, value=0.1),
        torch.maximum(x, one),
        x.clamp(-0.5, 0.5),
        torch.einsum("ij,kj->ik", x, y),
    ]
    torch.add(x, y, out=(out := to(torch.empty(0))))
    return torch.cat([each.flatten() for each in [*made, out]])


def _complex(to: Callable[[Tensor], Tensor]) -> Tensor:
    x = to(torch.randn(9, dtype=torch.complex64)).requires_grad_()
    made = torch.fft.ifft(x.conj()) + x.conj().imag * x.sgn()
    made.abs().sum().backward()
    assert x.grad is not None
    return torch.view_as_real(torch.cat([made.detach(), x.detach().conj().clone(), x.grad]).resolve_conj())


def _norms(to: Callable[[Tensor], Tensor]) -> Tensor:
    x = to(torch.randn(1000))
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64), torch.linalg.vector_norm(x, 1).double()]
    return torch.stack([*norms, *(each.double() for each in torch._foreach_norm([x, x * 2]))])


OPERATORS: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    **{f"attention, {mask}": _attention(mask, torch.float32) for mask in ("causal", "none", "boolean", "float")},
    "attention in bf16": _attention("causal", torch.bfloat16),
    "attention, scaled": _attention("none", torch.float32, scale=0.3),
    "embedding": _embedding,
    "draws": _draws,
    "indexing": _indexing,
    "arithmetic": _arithmetic,
    "norms": _norms,
    "complex numbers": _complex,
    "layer norm": _with_grad(lambda x: F.layer_norm(x, (9,)), 7, 9),
    "group norm": _with_grad(lambda x: F.group_norm(x, 3), 4, 9, 5),
    "rms norm": _with_grad(lambda x: F.rms_norm(x, (9,)), 7, 9),
    "silu, mish, gelu": _with_grad(lambda x: F.gelu(F.mish(F.silu(x))), 7, 9),
    "transposed convolution": _with_grad(lambda x: F.conv_transpose1d(x, torch.ones(3, 2, 3).to(x.device)), 2, 3, 8),
    "dropout of all, of none": _with_grad(lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.0), 9),
    "logits": _with_grad(lambda x: F.cross_entropy(x, torch.arange(7, device=x.device), label_smoothing=0.1), 7, 9),
    "a norm's derivative twice": _with_grad(lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0], 9),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_has_the_bits_of_the_cpu(operator: str) -> None:
    made = []
    for device in ("cpu", "late"):
        torch.manual_seed(0)
        made.append(OPERATORS[operator](lambda tensor, device=device: tensor.to(device)))  # type: ignore[misc]
    assert_equal_bits(made[1:], made[:1])
    assert late.races() == []


def test_an_encoder_of_torch_has_the_bits_of_the_cpu() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    given = torch.randn(2, 5, 16)
    made = []
    for device in ("cpu", "late"):
        torch.manual_seed(1)
        encoder.to(device).zero_grad()
        out = encoder(given.to(device))
        out.square().sum().backward()
        made.append([out, *(parameter.grad.cpu() for parameter in encoder.parameters() if parameter.grad is not None)])
    assert_equal_bits(made[1], made[0])


def test_draws_of_the_device_leave_the_cpus_generator_where_it_is() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = torch.randn(8, device="late")
    F.dropout(first, 0.5)
    torch.native_dropout(first, 0.5, True)
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(8)
    torch.late.manual_seed(0)  # type: ignore[attr-defined]
    assert torch.equal(torch.randn(8, device="late").cpu(), first.cpu())
