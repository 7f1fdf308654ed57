"""Models of the tests of pipelines under an unchanged loop, which writes what each step came to, and what members have.

A line of `steps-<member>.txt` is a step's number, loss and gradient norm; one of `parameters-<member>.txt` a step, a
parameter that this member has after it, and a digest of its bits.

It knows nothing of pipelines: alone under `python` it is the job of one that all others are compared with.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":  # as a script: make `tests` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import elastrain
from experiments.pipeline.present import lines_of
from tests.support.pipeline_models import CASES, DRAWN, WORDS, autocast, batch_of, loss_of


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random words: seeded per sample by the loader, so they are the same wherever they are drawn."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, WORDS, (13,))
        return words[:-1], words[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="gpt", choices=CASES | DRAWN)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--run-length", type=int, default=1)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--thaw-every", type=int, default=1, help="steps of which one trains the first parameter")
    parser.add_argument("--slow-while", type=Path, help="micro-batches wait a little while this file exists")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=7, run_length=args.run_length, backups=args.backups)
    case = (CASES | DRAWN)[args.case]
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sizes = {"global_batch_size": 2 * args.micro_batches, "micro_batch_size": 2}
    loader = elastrain.DataLoader(Texts(), **sizes, num_workers=0, collate_fn=case.collate)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=0.5)
    folder = Path(os.environ["ELASTRAIN_RUN_DIR"])
    me = os.environ.get("ELASTRAIN_MEMBER", "alone")
    with (
        (folder / f"steps-{me}.txt").open("w", buffering=1) as lines,
        (folder / f"parameters-{me}.txt").open("w", buffering=1) as parameters,
    ):
        for step in job.steps(loader, until=args.steps):
            next(model.parameters()).requires_grad_(step.number % args.thaw_every == 0)
            with autocast(case.autocast == "loop"):
                for batch in step:
                    with autocast(case.autocast == "forward"):
                        loss = loss_of(model, batch)
                    if args.slow_while is not None and args.slow_while.exists():
                        time.sleep(0.1)
                    step.backward(loss, weight=batch[0].numel())
            lines.write(f"{step.number} {step.loss!r} {step.grad_norm!r}\n")
            parameters.writelines(lines_of(model, step.number))
    with torch.no_grad(), autocast(bool(case.autocast)):
        loss = loss_of(model.eval(), batch_of(0))
    (folder / f"evaluated-{me}.txt").write_text(f"{float(loss)!r} {len(model.state_dict())} {job.digest()}")


if __name__ == "__main__":
    main()
