"""The random generator of the device: the CPU's algorithm, with a state of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

GENERATOR = torch.Generator()
GENERATOR.manual_seed(torch.default_generator.initial_seed())


@contextlib.contextmanager
def in_place_of_cpu() -> Iterator[None]:
    """Let operators that take no generator draw from the device's; the CPU's generator stays where it is."""
    kept = torch.default_generator.get_state()
    torch.default_generator.set_state(GENERATOR.get_state())
    try:
        yield
    finally:
        GENERATOR.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(kept)


def manual_seed(seed: int) -> None:
    GENERATOR.manual_seed(int(seed))


def get_rng_state(device: object = None) -> Tensor:
    return GENERATOR.get_state()


def set_rng_state(new_state: Tensor, device: object = None) -> None:
    GENERATOR.set_state(new_state)


def initial_seed() -> int:
    return GENERATOR.initial_seed()
