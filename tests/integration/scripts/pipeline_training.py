"""Models of the tests of pipelines under an unchanged loop; a line per step and member: its number and the digest.

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
from tests.support.pipeline_models import CASES, WORDS, autocast, loss_of


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random words: seeded per sample by the loader, so they are the same wherever they are drawn."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, WORDS, (13,))
        return words[:-1], words[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="gpt", choices=CASES)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=6)
    parser.add_argument("--run-length", type=int, default=1)
    parser.add_argument("--slow-while", type=Path, help="micro-batches wait a little while this file exists")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=7, run_length=args.run_length)
    case = CASES[args.case]
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = elastrain.DataLoader(Texts(), global_batch_size=2 * args.micro_batches, micro_batch_size=2, num_workers=0)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=0.5)
    folder = Path(os.environ["ELASTRAIN_RUN_DIR"])
    with (folder / f"steps-{os.environ.get('ELASTRAIN_MEMBER', 'alone')}.txt").open("w", buffering=1) as lines:
        for step in job.steps(loader, until=args.steps):
            with autocast(case.autocast == "loop"):
                for batch in step:
                    with autocast(case.autocast == "forward"):
                        loss = loss_of(model, batch)
                    if args.slow_while is not None and args.slow_while.exists():
                        time.sleep(0.1)
                    step.backward(loss, weight=batch[0].numel())
            lines.write(f"{step.number} {job.digest()} {step.loss!r} {step.grad_norm!r}\n")


if __name__ == "__main__":
    main()
