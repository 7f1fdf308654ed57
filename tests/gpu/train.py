"""The README's script on a device: `model.to(device)`, `batch.to(device)`. Alone it is a job of one.

`--do` strikes one member at one step: what a test part needs, and what no injected fault can do to a device.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

if __name__ == "__main__":  # as a script: make `tests` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.train_gpt.model import GPT, SIZES, GPTConfig

MODELS = {
    "small": GPTConfig(layers=3, heads=2, width=32, context=16, vocabulary=64),
    "bits": GPTConfig(layers=6, heads=8, width=512, context=256, vocabulary=8192),
    "124m": SIZES["124m"],
    "1b": GPTConfig(layers=18, heads=16, width=2048, context=1024, vocabulary=50304),
}
"""`bits` reaches tensor cores and split-K; `small` is for rehearsals."""


class Texts(torch.utils.data.Dataset[Tensor]):
    """Random tokens: seeded per sample by the loader, so that they are the same wherever they are drawn."""

    def __init__(self, config: GPTConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, self.config.vocabulary, (self.config.context + 1,))


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def prepare_device(device: str) -> None:
    """Make torch know the test device."""
    if device == "late":
        from tests.support import late

        torch.__future__.set_swap_module_params_on_conversion(True)
        late.install()


def illegal_access(device: str) -> None:
    """Read far behind the memory that the device has given: its error sticks to the process."""
    if device == "late":
        from tests.support import late

        late.fail_at(1)
        return
    small = torch.zeros(1 << 20, device=device)
    interface = {"data": (small.data_ptr(), False), "shape": (1 << 40,), "typestr": "<f4", "version": 2}
    wide = torch.as_tensor(type("Wide", (), {"__cuda_array_interface__": interface})(), device=device)
    wide[1 << 39 :: 1 << 36].sum().item()


def endless(device: str) -> None:
    """Submit work that does not end to the current stream."""
    if device == "late":
        from tests.support import late

        late.hang_at(1)
    else:
        for _ in range(64):
            torch.cuda._sleep(1 << 40)


def strike(what: str, device: str) -> None:
    """Do to this process what `--do` says, and leave the moment in the run's folder."""
    moment = Path(os.environ["ELASTRAIN_RUN_DIR"]) / "struck"
    moment.write_text(repr(time.monotonic()))
    if what == "loop":
        time.sleep(600)
    elif what == "oom":
        torch.empty(1 << 46, dtype=torch.uint8, device=device)
    elif what == "stream":
        endless(device)
    else:
        illegal_access(device)


def hold(file: Path | None, *, newcomer: bool) -> None:
    """Wait for at most 1.5 s while the file exists, so that a newcomer finds steps left; the newcomer removes it."""
    if file is None:
        return
    if newcomer:
        file.unlink(missing_ok=True)
    until_s = time.monotonic() + 1.5
    while file.exists() and time.monotonic() < until_s:
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--run-length", type=int, default=1)
    parser.add_argument("--do", choices=("illegal", "oom", "stream", "loop"))
    parser.add_argument("--at", type=int, default=6, help="step of --do")
    parser.add_argument("--member", default="m1", help="member of --do")
    parser.add_argument("--hold", type=Path, help="while this file exists, micro-batches wait for a newcomer")
    parser.add_argument("--hold-from", type=int, default=4, help="step from which they wait for long")
    parser.add_argument("--members", type=int, default=1, help="with --hold: members of a higher number are newcomers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare_device(args.device)
    job = elastrain.init(seed=7, run_length=args.run_length)
    config = MODELS["small" if args.small else "bits"]
    loader = elastrain.DataLoader(Texts(config), global_batch_size=32, micro_batch_size=4)
    model = GPT(config).to(args.device)
    if args.bf16:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    member = os.environ.get("ELASTRAIN_MEMBER", "")
    for step in job.steps(loader, until=args.steps):
        for batch in step:
            if args.do and member == args.member and step.number == args.at:
                strike(args.do, args.device)
            if step.number >= args.hold_from:
                hold(args.hold, newcomer=int(member.removeprefix("m") or 0) >= args.members)
            with torch.autocast(args.device, torch.bfloat16) if args.autocast else nullcontext():
                loss = loss_of(model, batch.to(args.device))
            step.backward(loss)
        scheduler.step()
    print(f"digest {job.digest()}", flush=True)


if __name__ == "__main__":
    main()
