"""Methods of torch's optimizers are called without the compiler where they are known, and stay as they are if not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.optim.optimizer import _use_grad_for_differentiable

from elastrain.runtime.model.kernels import unwrap


def does_more(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def inner(*args: Any, **kwargs: Any) -> Any:
        import torch._dynamo

        torch._dynamo.graph_break()
        torch.cuda.synchronize()
        return fn(*args, **kwargs)

    return inner


def plain(self: Any) -> str:
    return "called"


NOT_KNOWN = {
    "a plain function": plain,
    "a wrapper that does more": does_more(plain),
    "no function": functools.partial(plain, None),
    "nothing": None,
}


@pytest.mark.parametrize("method", NOT_KNOWN.values(), ids=NOT_KNOWN.keys())
def test_what_another_torch_has_there_stays_as_it_is(method: Any) -> None:
    base = type("Base", (), {"zero_grad": method})
    child = type("Child", (base,), {"step": method})
    unwrap(base, [child, type("Stranger", (), {"step": method}), type("Without", (base,), {})])
    assert vars(base)["zero_grad"] is method and vars(child)["step"] is method


def test_what_this_torch_has_there_is_called_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    base = type("Base", (), {"zero_grad": torch._disable_dynamo(plain), "defaults": {"differentiable": False}})
    child = type("Child", (base,), {"step": _use_grad_for_differentiable(plain)})
    unwrap(base, [child])
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    optimizer = cast(Any, child())
    assert optimizer.zero_grad() == optimizer.step() == "called"
    assert "torch._dynamo" not in sys.modules
