"""What these tests have in common: small limits count for small models, and torch computes with one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elastrain.offload.lifetimes import within as module
from tests.integration.offload.lifetimes.touching import small_memory


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of some MiB holds, although Python alone takes more."""
    monkeypatch.setattr(module, "memory_for", small_memory)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's own threads are none of the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
