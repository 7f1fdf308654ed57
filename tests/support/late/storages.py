"""Storages by themselves, as `torch.load` and `copy.deepcopy` make them: torch would ask an allocator of C++."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.late.memory import NAME

Storage = torch.UntypedStorage


def register() -> None:
    clone, to = Storage.clone, Storage.to

    def clone_here(self: Storage) -> Storage:
        return _on_device(self) if self.device.type == NAME else clone(self)

    def to_there(self: Storage, *, device: Any, non_blocking: bool = False) -> Storage:
        is_coming = torch.device(device).type == NAME and self.device.type != NAME
        return _on_device(self) if is_coming else to(self, device=device, non_blocking=non_blocking)

    vars(torch)["UntypedStorage"].clone, vars(torch)["UntypedStorage"].to = clone_here, to_there


def _on_device(storage: Storage) -> Storage:
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=NAME)
    return made.copy_(_bytes(storage)).untyped_storage()


def _bytes(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
