"""All that a resumed job has to bring back: BatchNorm, a tied weight, a frozen parameter, dropout, bfloat16 with
masters, loss scaling, a schedule, and a registered mean of the weights. `--save-at` writes a checkpoint before a step.
"""

import argparse
import copy
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import elastrain
from tests.integration.scripts import small_training
from tests.support.saving import save


class Model(small_training.Model):
    """With BatchNorm, a frozen parameter, and layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.norm = nn.BatchNorm1d(64)
        self.layers.to(torch.bfloat16)
        self.entry.bias.requires_grad_(False)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.entry(inputs)) + self.embedding(labels.flip(0))
        for layer in self.layers:
            hidden = hidden + layer(hidden.bfloat16()).float()
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save-at", type=int, nargs="*", default=[])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--slow-while", type=Path, help="a file: while it exists, a micro-batch takes eight seconds")
    parser.add_argument("--load", type=Path, help="a state dict that the script loads by itself")
    parser.add_argument("--dump", type=Path, help="where the model's state dict goes before the first step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=args.seed, backups=args.backups, loss_scale=elastrain.LossScale(growth_interval=2))
    model = Model()
    if args.load is not None:
        model.load_state_dict(load_file(args.load))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = elastrain.DataLoader(small_training.Samples(50), global_batch_size=20, micro_batch_size=4)
    mean = copy.deepcopy(model)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=0.5)
    job.register("mean", mean)
    seen = torch.zeros(2)
    job.register("seen", seen)
    for step in job.steps(loader, until=args.steps):
        if args.dump is not None and step.number == 0:
            save_file({name: value.clone() for name, value in model.state_dict().items()}, args.dump)
        if step.number in args.save_at:
            save(job, step, args.folder)
        for inputs, labels in step:
            time.sleep(8.0 if args.slow_while is not None and args.slow_while.exists() else args.slow)
            step.backward(nn.functional.cross_entropy(model(inputs, labels), labels))
        scheduler.step()
        seen += torch.tensor([step.loss, step.samples])
        with torch.no_grad():
            theirs = model.state_dict()
            for name, ours in mean.named_parameters():
                ours.lerp_(theirs[name], 0.1)
    whole = [*mean.state_dict().values(), *model.state_dict().values(), seen]
    told = sum(float(value.double().sum()) for value in whole)
    sys.stderr.write(f"digest {job.digest()} told {told:.17g} lr {optimizer.param_groups[0]['lr']:.17g}\n")


if __name__ == "__main__":
    main()
