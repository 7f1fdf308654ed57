"""Models of the tests of pipelines under an unchanged loop, which writes what each step came to, and what members have.

A line of `steps-<member>.txt` is a step's number, loss and gradient norm; one of `parameters-<member>.txt` a step, a
parameter that this member has after it, and a digest of its bits; one of `waits-<member>.txt` a step, and how often the
loop waited for the device in it.

It knows nothing of pipelines: alone under `python` it is the job of one that all others are compared with.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":  # as a script: make `tests` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import elastrain
from experiments.pipeline.present import lines_of
from tests.support.pipeline_models import CASES, DRAWN, WORDS, autocast, batch_of, loss_of, new_tensors_on


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random words: seeded per sample by the loader, so they are the same wherever they are drawn."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, WORDS, (13,))
        return words[:-1], words[1:]


def waits_of(device: str) -> Callable[[], int]:
    """Register the device if it is the test device. Returns what counts the waits of this thread for it."""
    if device != "late":
        return lambda: 0
    from tests.support import late

    late.install()
    return lambda: late.stats("MainThread")["waits"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="gpt", choices=CASES | DRAWN)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--run-length", type=int, default=1)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--thaw-every", type=int, default=1, help="steps of which one trains the first parameter")
    parser.add_argument("--slow-while", type=Path, help="micro-batches wait a little while this file exists")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    waits = waits_of(args.device)
    torch.set_num_threads(1)
    job = elastrain.init(seed=7, run_length=args.run_length, backups=args.backups)
    case = (CASES | DRAWN)[args.case]
    model = case.model(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sizes = {"global_batch_size": 2 * args.micro_batches, "micro_batch_size": 2}
    loader = elastrain.DataLoader(Texts(), **sizes, num_workers=0, collate_fn=case.collate)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=0.5)
    folder = Path(os.environ["ELASTRAIN_RUN_DIR"])
    me = os.environ.get("ELASTRAIN_MEMBER", "alone")
    with (
        (folder / f"steps-{me}.txt").open("w", buffering=1) as lines,
        (folder / f"parameters-{me}.txt").open("w", buffering=1) as parameters,
        (folder / f"waits-{me}.txt").open("w", buffering=1) as waited,
    ):
        for step in job.steps(loader, until=args.steps):
            next(model.parameters()).requires_grad_(step.number % args.thaw_every == 0)
            before = waits()
            with autocast(case.autocast == "loop", args.device):
                for batch in step:
                    moved = [each.to(args.device, non_blocking=True) for each in batch]
                    with autocast(case.autocast == "forward", args.device), new_tensors_on(args.device):
                        loss = loss_of(model, moved)
                    if args.slow_while is not None and args.slow_while.exists():
                        time.sleep(0.1)
                    step.backward(loss, weight=batch[0].numel())
            waited.write(f"{step.number} {waits() - before}\n")
            lines.write(f"{step.number} {step.loss!r} {step.grad_norm!r}\n")
            parameters.writelines(lines_of(model, step.number))
    batch = [each.to(args.device) for each in batch_of(0)]
    with torch.no_grad(), autocast(bool(case.autocast), args.device), new_tensors_on(args.device):
        loss = loss_of(model.eval(), batch)
    (folder / f"evaluated-{me}.txt").write_text(f"{float(loss)!r} {len(model.state_dict())} {job.digest()}")


if __name__ == "__main__":
    main()
