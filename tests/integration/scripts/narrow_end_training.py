"""A stack that is mostly frozen, for pipelines whose members have room for their own blocks, and not all for the rest.

`--limit m2=1000` gives a member a memory limit of its own, in MiB, and `--keeps m2=64` has its script keep so many MiB
from step 1 on. Behind the loop each member writes what it gets of the whole model into `ended-<member>.txt`.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

if __name__ == "__main__":  # as a script: make `tests` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import elastrain
from tests.integration.scripts.piped_training import Samples

ME = os.environ.get("ELASTRAIN_MEMBER", "alone")
MIB = 1 << 20


class Layer(nn.Module):
    """Residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.into = nn.Linear(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.out = nn.Linear(width, 64)
        self.layers.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.into(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)


def told(name: str, ask: object) -> str:
    try:
        return f"{name} {ask()}"  # type: ignore[operator]
    except elastrain.ConfigError as error:
        return f"{name} refused: {error}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--limit", action="append", default=[])
    parser.add_argument("--keeps", action="append", default=[])
    parser.add_argument("--keeps-from", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    limits = dict(each.split("=") for each in args.limit)
    keeps = dict(each.split("=") for each in args.keeps)
    own_limit = int(limits[ME]) * MIB if ME in limits else None
    job = elastrain.init(seed=3, backups=3, memory_limit=own_limit)
    model = Model(width=992, layers=24)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loader = elastrain.DataLoader(Samples(), global_batch_size=12, micro_batch_size=2)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    kept = []
    for step in job.steps(loader, until=args.steps):
        if step.number == args.keeps_from and ME in keeps:
            kept.append(torch.ones(int(keeps[ME]) * MIB // 4))
        for inputs in step:
            step.backward(nn.functional.mse_loss(model(inputs), inputs))
    sample = torch.ones(1, 64)
    lines = [
        told("rank", lambda: job.rank),
        told("digest", job.digest),
        told("state", lambda: len(model.state_dict())),
        told("evaluated", lambda: model(sample).sum().item().hex()),
    ]
    if "ELASTRAIN_RUN_DIR" in os.environ:
        Path(os.environ["ELASTRAIN_RUN_DIR"], f"ended-{ME}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
