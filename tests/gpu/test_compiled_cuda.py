"""`torch.compile(backend="elastrain")` on a CUDA device; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastrain.offload.activations.hooks import ActivationOffload, OffloadConfig
from elastrain.offload.lifetimes.pieces.cuda import host_tier
from experiments.offload.models import Shape, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = Shape(width=512, layers=4, tokens=512, batch=8)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("below", "autocast", "host_bytes"),
    [
        ("aot_eager", False, 0),
        ("aot_eager", True, 0),
        ("inductor", False, 0),
        ("inductor", True, 0),
        ("aot_eager", False, 2 << 30),
    ],
)
def test_gradients_are_those_of_the_compiled_model_and_the_device_has_room(
    below: str, autocast: bool, host_bytes: int, tmp_path: Path
) -> None:
    from elastrain.offload.compiling.backend import elastrain

    def after_forward(offload: object) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        with torch.device("cuda"):
            model, tokens = build("gpt", SHAPE)
        run = torch.compile(model, backend=below, fullgraph=True)
        if offload is not None:
            run = torch.compile(model, backend=elastrain, options={"backend": below}, fullgraph=True)
        held = 0
        for _ in range(3):
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            with (
                offload or torch.autocast("cpu", enabled=False),
                torch.autocast("cuda", torch.bfloat16, enabled=autocast),
            ):  # type: ignore[attr-defined]
                loss = run(tokens)
            held = torch.cuda.memory_allocated() - before
            loss.backward()
        return held, [each.grad.cpu() for each in model.parameters() if each.grad is not None]

    kept_bytes, expected = after_forward(None)
    config = OffloadConfig(dirs=(str(tmp_path),), memory_limit=kept_bytes // 3)
    offload = ActivationOffload(config, engines=[host_tier(host_bytes)] if host_bytes else None)
    held_bytes, found = after_forward(offload)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert held_bytes < 0.6 * kept_bytes
    offload.close()


def test_cuda_graphs_are_refused() -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    from elastrain.offload.compiling.backend import elastrain

    run = torch.compile(lambda x: (x * 2).sum(), backend=elastrain, mode="reduce-overhead")
    with pytest.raises(BackendCompilerFailed, match="cannot be used with CUDA graphs"):
        run(torch.ones(4, device="cuda", requires_grad=True))
