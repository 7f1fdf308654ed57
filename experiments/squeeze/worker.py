"""A training script whose activations are most of its memory. For `run.py`.

Where the environment names a folder of memory cgroups, the process puts itself into one of its own before it imports
torch, which takes memory too: that is why torch is imported in `main`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

GROUPS, GROUP_LIMIT = "SQUEEZE_GROUPS", "SQUEEZE_GROUP_LIMIT_BYTES"
FEATURES = 256
MICRO_BATCHES = 8


def enter_group(groups: Path, limit_bytes: str | None) -> None:
    """From now on the kernel counts this process's memory by itself, and ends it where it goes beyond the limit."""
    group = groups / os.environ.get("ELASTRAIN_MEMBER", "m0")
    group.mkdir()
    if limit_bytes is not None:
        (group / "memory.limit_in_bytes").write_text(limit_bytes)
    (group / "cgroup.procs").write_text(str(os.getpid()))


def train(args: argparse.Namespace) -> None:
    """Dropout included: a redone micro-batch must draw the same mask."""
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    import elastrain

    class Samples(Dataset[Tensor]):
        """Sample `i` is drawn from a generator seeded with `i`."""

        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> Tensor:
            return torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))

    torch.set_num_threads(1)
    job = elastrain.init(seed=0)
    sizes = [FEATURES, *[args.width] * args.layers, FEATURES]
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(0.1)) for a, b in itertools.pairwise(sizes)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = elastrain.DataLoader(
        Samples(), global_batch_size=MICRO_BATCHES * args.micro_batch_size, micro_batch_size=args.micro_batch_size
    )
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for inputs in step:
            step.backward(nn.functional.mse_loss(model(inputs), inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    args = parser.parse_args()
    if GROUPS in os.environ:
        enter_group(Path(os.environ[GROUPS]), os.environ.get(GROUP_LIMIT))
    train(args)


if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
