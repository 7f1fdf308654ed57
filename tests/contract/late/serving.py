"""A process that has the device and runs tests of this folder by name: a process of pytest must not have it."""

from __future__ import annotations

import gc
import importlib
import json
import sys
import traceback
from typing import Any

import torch

from tests.support import late


def begin() -> None:
    """Make the device what it is in a new process."""
    late.release()
    late.repair()
    late.configure(**vars(late.Settings()))
    device = torch.get_device_module(late.NAME)
    device.set_stream(device.default_stream())
    gc.collect()  # tensors of a test that failed
    device.synchronize()
    late.races(forget=True)
    torch.manual_seed(0)


def run(module: str, name: str, given: dict[str, Any]) -> str:
    """Run one test. Returns the text of its failure, or nothing."""
    begin()
    try:
        getattr(importlib.import_module(module), name)(**given)
    except BaseException:  # noqa: BLE001 - the edge of a process: the test shows it
        return traceback.format_exc()
    return ""


def main() -> None:
    late.install()
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
