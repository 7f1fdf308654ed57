"""Real text that every machine has: the Python standard library's source files, as bytes.

No download, no cache on disk, no randomness: the same interpreter version gives the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

Split = Literal["train", "held_out"]

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
BUILD_SPECIFIC = ("_sysconfigdata", "sitecustomize")
"""Beginnings of the names of files that differ between builds of one Python version."""
HELD_OUT_FRACTION = 0.05
"""Share of the bytes, taken as whole files from the end of the sorted list."""


def source_files(root: Path | None = None) -> list[Path]:
    """The `.py` files under `root` (by default the running interpreter's library), in order of their names."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(BUILD_SPECIFIC)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def split_files(sizes_bytes: Iterable[int]) -> int:
    """Index of the first held-out file: the shortest tail of files with HELD_OUT_FRACTION of the bytes."""
    sizes = list(sizes_bytes)
    wanted, tail = HELD_OUT_FRACTION * sum(sizes), 0
    for index in range(len(sizes) - 1, 0, -1):
        tail += sizes[index]
        if tail >= wanted:
            return index
    return 0


@lru_cache(maxsize=1)
def _texts() -> dict[Split, Tensor]:
    """uint8 tensors, read once per process."""
    contents = [path.read_bytes() for path in source_files()]
    cut = split_files(len(content) for content in contents)
    return {"train": _bytes(contents[:cut]), "held_out": _bytes(contents[cut:])}


def _bytes(contents: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)


def text(split: Split) -> Tensor:
    """The split's bytes, 1-D uint8. Shared and cached: do not write to it."""
    return _texts()[split]


def text_digest(split: Split) -> str:
    """SHA-256 of the split, hexadecimal: two machines train on the same text if these are equal."""
    return hashlib.sha256(text(split).numpy().tobytes()).hexdigest()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Fixed, non-overlapping windows: item `i` is (inputs, targets), each (context,) int64, targets one byte ahead.

    Holds no text itself, so that it travels to loader processes in a few bytes.
    """

    def __init__(self, split: Split, *, context: int) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1 token; got {context}")
        self.split: Split = split
        self.context = context

    def __len__(self) -> int:
        return (text(self.split).numel() - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = text(self.split)[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def batch_of(windows: Windows, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Windows stacked to (inputs, targets), each (len(indices), context) int64."""
    items = [windows[index] for index in indices]
    return torch.stack([item[0] for item in items]), torch.stack([item[1] for item in items])


def spread(windows: Windows, count: int) -> list[int]:
    """`count` window indices spread evenly over the split: the same ones at every call."""
    return [index * len(windows) // count for index in range(min(count, len(windows)))]
