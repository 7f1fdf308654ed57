"""Trains on the test device, whose failures DEVICE_FAULTS orders ("m1@3 error,m2@any oom"); without it on the CPU.

Each worker has the device of its slot, or all have the one of DEVICE_SHARED. With DEVICE_DEFAULT it is torch's default.
With DEVICE_IN_PLACE members read each other's device memory in place, if the probe finds that it works.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import elastrain
from elastrain.offload.activations.deferred import DeferredLock
from tests.integration.scripts.small_training import Model, Samples, hold_up

ORDERS = os.environ.get("DEVICE_FAULTS")
if ORDERS is not None:
    from tests.support import late

    late.install()
    late.handing_over(DeferredLock, gives=["__exit__", "wait"], takes=["__enter__", "wait"])
    late.configure(uuid=os.environ.get("DEVICE_SHARED") or f"late-{os.environ['LOCAL_RANK']}")
    if "DEVICE_IN_PLACE" in os.environ:
        from tests.support.late import sharing

        sharing.set_up()


def strike(step: int, micro_batch: int | None) -> None:
    """Break the device, or take its free memory away, if this member or all are to be struck here."""
    me = os.environ.get("ELASTRAIN_MEMBER")
    for order in filter(None, (ORDERS or "").split(",")):
        place, kind = order.split()
        member, _, number = place.partition("@")
        if member in (me, "*") and number in (str(step), "any") and (member == me or micro_batch == 4):
            if kind == "oom":
                late.configure(capacity_bytes=torch.late.memory_allocated())  # type: ignore[attr-defined]
            else:
                late.fail_at(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--backups", default="1")
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--saved-in", type=Path, help="saved activations lie in this directory, but for 32 KiB")
    parser.add_argument("--limits", default="{}", help="memory limits as arguments of init, as JSON")
    parser.add_argument("--slow-while", type=Path, help="micro-batches wait a little while this file exists")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    backups = args.backups if args.backups == "all" else int(args.backups)
    job = elastrain.init(seed=7, run_length=2, backups=backups, **json.loads(args.limits))
    device = "cpu" if ORDERS is None else "late"
    if "DEVICE_DEFAULT" in os.environ:
        torch.set_default_device(device)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = elastrain.DataLoader(Samples(), global_batch_size=40, micro_batch_size=4, num_workers=args.loaders)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=0.5)
    saved: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if args.saved_in is not None:
        saved = elastrain.offload.save_on_disk(args.saved_in, memory_limit=32 << 10, min_bytes=512)
    for step in job.steps(loader, until=args.steps):
        for inputs, labels in step:
            if args.slow_while is not None:
                hold_up(args.slow_while, step.number)
            strike(step.number, step.micro_batch)
            inputs, labels = inputs.to(device), labels.to(device)
            with saved:
                loss = nn.functional.cross_entropy(model(inputs, labels), labels)
            step.backward(loss, weight=float(len(labels)))
    if isinstance(saved, elastrain.offload.ActivationOffload):
        sys.stderr.write(f"spilled {saved.stats().spilled_bytes}\n")


if __name__ == "__main__":
    main()
