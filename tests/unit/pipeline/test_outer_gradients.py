"""Gradients that code between blocks takes through blocks end in a sentence, in the tracing pass and in later ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd import grad as imported_grad

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.stubs import Stubs
from tests.support.traced import trace

WIDTH = 6
BLOCKS = ("0", "1", "2")
Slope = Callable[[nn.Module, Tensor], object]


def critic() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1))


def by_grad(model: nn.Module, x: Tensor, **options: bool) -> object:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True, **options)


def by_is_grads_batched(model: nn.Module, x: Tensor) -> object:
    x = x.clone().requires_grad_()
    made = model(x)[:, 0]
    return imported_grad(made, x, torch.eye(len(made)), is_grads_batched=True)


def by_weights(model: nn.Module, x: Tensor) -> object:
    return torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)


def by_backward(model: nn.Module, x: Tensor) -> object:
    model(x).sum().backward(create_graph=True)
    return None


def by_backward_of_inputs(model: nn.Module, x: Tensor) -> object:
    x = x.clone().requires_grad_()
    torch.autograd.backward(model(x).sum(), inputs=[x], create_graph=True)
    return x.grad


def by_forward_mode(model: nn.Module, x: Tensor) -> object:
    with forward_ad.dual_level():
        made = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(made).tangent.pow(2)


def by_sample(model: nn.Module, x: Tensor) -> object:
    values = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x[None],)).sum()

    return torch.func.vmap(torch.func.grad(of_one), (None, 0))(values, x)


SLOPES: dict[str, Slope] = {
    "grad": by_grad,
    "grad, allow_unused": lambda model, x: by_grad(model, x, allow_unused=True),
    "grad, materialize_grads": lambda model, x: by_grad(model, x, materialize_grads=True),
    "grad of weights": by_weights,
    "is_grads_batched": by_is_grads_batched,
    "backward": by_backward,
    "backward of inputs": by_backward_of_inputs,
    "functional.jacobian": torch.autograd.functional.jacobian,
    "functional.jacobian, vectorize": lambda model, x: torch.autograd.functional.jacobian(model, x, vectorize=True),
    "functional.hessian": lambda model, x: torch.autograd.functional.hessian(lambda x: model(x).sum(), x),
    "func.grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "func.vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(len(x), 1)),
    "func.jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "func.jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "func.hessian": lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x),
    "func.vmap": lambda model, x: torch.func.vmap(model)(x),
    "of samples": by_sample,
    "forward mode": by_forward_mode,
}
SENTENCE = r"do not go through blocks that another member computes: do that in a block, or train without --stages$"


@pytest.mark.parametrize("how", SLOPES)
def test_in_the_tracing_pass(how: str) -> None:
    model, x = critic(), torch.rand(3, WIDTH)
    SLOPES[how](critic(), x)  # torch itself can
    with pytest.raises(ConfigError, match=SENTENCE):
        trace(model, BLOCKS, lambda: SLOPES[how](model, x))


@pytest.mark.parametrize("how", SLOPES)
def test_where_only_a_later_micro_batch_does_so(how: str) -> None:
    """As with a penalty in every sixteenth step. Both members say so, whichever of them comes to it first."""
    model, x = critic(), torch.rand(3, WIDTH)
    traced = trace(model, BLOCKS, lambda: model(x.clone().requires_grad_()).sum())
    for stretch, received in (((0, 2), ()), ((2, 3), (torch.rand(3, WIDTH, requires_grad=True),))):
        stubs = Stubs(model, traced, *stretch)
        stubs.begin(received)
        with pytest.raises(ConfigError, match=SENTENCE):
            SLOPES[how](model, x)
        stubs.finish()
        stubs.close()


def test_gradients_that_meet_no_block_are_the_scripts_own() -> None:
    model, x, other = critic(), torch.rand(3, WIDTH), nn.Linear(WIDTH, WIDTH)

    def body() -> Tensor:
        own = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(other(own).square().sum(), own, create_graph=True)
        assert torch.func.grad(lambda x: other(x).sum())(x).shape == x.shape
        return model(x + slope).sum()

    traced = trace(model, BLOCKS, body)
    stubs = Stubs(model, traced, 0, 2)
    stubs.begin()
    body()
    stubs.close()


def test_a_mistake_of_the_scripts_own_stays_its_own() -> None:
    model, x = critic(), torch.rand(3, WIDTH)

    def body() -> None:
        model(x)
        torch.autograd.grad(torch.rand(3, requires_grad=True).sum(), x.clone().requires_grad_())

    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        trace(model, BLOCKS, body)


def test_nested_tensors() -> None:
    model, x = critic(), torch.rand(3, WIDTH)
    with pytest.raises(
        ConfigError, match=r"block '0' takes or returns a nested tensor.*pad the batch.* without --stages"
    ):
        trace(model, BLOCKS, lambda: model(torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.strided)))
