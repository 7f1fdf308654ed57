"""Two newcomers come one after the other within a single step of the one member that is left.

m1 and m2 die in step `KILL_AT`. m0 does not end the next step before it has been told of two views: the second newcomer
waits for the view that lets the first one in. So the first newcomer begins in a view that m0 never takes over.
`--longer-s`: m0's step takes so much longer still.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import elastrain

KILL_AT, UNTIL = 3, 9
WAIT_S = 120.0
ME = os.environ.get("ELASTRAIN_MEMBER", "alone")


def wait_for_view_with(members: set[str]) -> None:
    """Until the agent has told of a view with all of these."""
    events = Path(os.environ["ELASTRAIN_RUN_DIR"]) / "events.jsonl"
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        lines = [json.loads(line) for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if any(line["event"] == "view" and members <= set(line["members"]) for line in lines):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{ME} waited in vain for a view with {sorted(members)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--longer-s", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if ME == "m4":
        wait_for_view_with({"m3"})
    job = elastrain.init(seed=3, backups="all")
    loader = elastrain.DataLoader(
        [torch.full((8,), i / 50) for i in range(50)], global_batch_size=12, micro_batch_size=2
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model, _, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    for step in job.steps(loader, until=UNTIL):
        for inputs in step:
            if step.number == KILL_AT and ME in ("m1", "m2"):
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number == KILL_AT + 1 and ME == "m0":
                wait_for_view_with({"m0", "m3", "m4"})
                time.sleep(args.longer_s)
                args.longer_s = 0.0
            step.backward((model(inputs) - inputs).square().mean())


if __name__ == "__main__":
    main()
