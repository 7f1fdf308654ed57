"""Reads offline runs of Weights & Biases from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastrain.runtime.loggers.wandb_run import _records


def rows(folder: Path, value: str) -> list[tuple[str, int, Any]]:
    """Run id, step and one value of each row of all offline files, in the order of their names."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="wandb is not installed")
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run = ""
        for _, payload in _records(path.read_bytes()):
            record = messages.Record.FromString(payload)
            run = record.run.run_id or run
            if record.WhichOneof("record_type") == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                found.append((run, record.history.step.num, json.loads(items[value])))
    return found
