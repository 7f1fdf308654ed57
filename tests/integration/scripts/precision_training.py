"""The model of `small_training.py` in several precisions.

`mixed` keeps parameters in bfloat16 but the normalisation layers' in float32; `autocast` keeps all in float32 and
computes in bfloat16; `float16` converts everything, and scales the losses.
"""

import argparse
import contextlib
import sys
import time

import torch
from torch import nn

import elastrain
from tests.integration.scripts.small_training import Model, Samples


def converted(model: Model, precision: str) -> Model:
    if precision == "float16":
        model.half()
    if precision == "mixed":
        for module in model.to(torch.bfloat16).modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--precision", choices=["float32", "mixed", "autocast", "float16"], default="float32")
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--around", action="store_true", help="one autocast around the whole loop")
    parser.add_argument("--linger", type=int, default=0, help="go slowly after step 10 while there are fewer members")
    args = parser.parse_args()
    torch.set_num_threads(1)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "autocast")
    scaling = elastrain.LossScale(initial=2.0**20, growth_interval=4) if args.precision == "float16" else None
    job = elastrain.init(seed=7, run_length=2, loss_scale=scaling)
    model = converted(Model(nn.BatchNorm1d if args.batch_norm else nn.LayerNorm), args.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = elastrain.DataLoader(Samples(), global_batch_size=40, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=0.5)
    with autocast if args.around else contextlib.nullcontext():
        for step in job.steps(loader, until=args.steps):
            for inputs, labels in step:
                with contextlib.nullcontext() if args.around else autocast:
                    loss = nn.functional.cross_entropy(model(inputs, labels), labels)
                step.backward(loss, weight=float(len(labels)))
            if step.number >= 10 and job.world_size < args.linger:
                time.sleep(1.0)
    buffers = [float(buffer.double().sum()) for buffer in model.buffers()]
    sys.stderr.write(f"digest {job.digest()} buffers {buffers}\n")


if __name__ == "__main__":
    main()
