"""Is anybody evicted who is only slow for an honest reason? A job without faults, and who was lost in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastrain.job.batch import DataOrder
from experiments.jobs import Script, elastic, finish
from experiments.journals import Run, read_run

SCRIPT = Path(__file__).with_name("healthy_train.py")
SAMPLES, GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 20_000, 24, 4
MICRO_BATCH_S, STEP_S = 0.1, 0.25
"""What a micro-batch takes, and about what a step of six takes three members."""
COMPILE_S, STALL_S, EVALUATE_S, SAVE_S = 60.0, 30.0, 30.0, 20.0
QUIET_STEPS = 60
"""Between two of them: long enough for the watch to learn the usual step again."""
ROUND_S = COMPILE_S + STALL_S + EVALUATE_S + SAVE_S + 4 * QUIET_STEPS * STEP_S
NODES = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps at which something lasts; in step 0 every micro-batch takes ten times as long."""

    steps: int
    micro_batch_s: float = MICRO_BATCH_S
    compile_s: dict[int, float] = field(default_factory=dict)
    """In the step's first micro-batch, on every member."""
    evaluate_s: dict[int, float] = field(default_factory=dict)
    """After the step, on every member."""
    save_s: dict[int, float] = field(default_factory=dict)
    """After the step, on rank 0 alone, while the others go on to the next one."""
    stalls_s: dict[int, float] = field(default_factory=dict)
    """Sample -> what it takes to come."""

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Plan:
        """JSON's keys are text."""
        tables = {
            name: {int(key): each for key, each in value.items()}
            for name, value in fields.items()
            if isinstance(value, dict)
        }
        return Plan(**{**fields, **tables})


def plan(minutes: float) -> Plan:
    """Rounds of compile, stall, evaluation and checkpoint, quiet steps between them; at least one round."""
    rounds = max(1, round(minutes * 60 / ROUND_S))
    order = DataOrder(dataset_size=SAMPLES, global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE)
    first = [1 + index * 4 * QUIET_STEPS for index in range(rounds)]
    stalled = [order.samples(step + QUIET_STEPS, 2)[0][1] for step in first]
    return Plan(
        steps=first[-1] + 4 * QUIET_STEPS,
        compile_s=dict.fromkeys(first, COMPILE_S),
        stalls_s=dict.fromkeys(stalled, STALL_S),
        evaluate_s=dict.fromkeys([step + 2 * QUIET_STEPS for step in first], EVALUATE_S),
        save_s=dict.fromkeys([step + 3 * QUIET_STEPS for step in first], SAVE_S),
    )


def measured(folder: Path, minutes: float) -> dict[str, Any]:
    """Runs the plan on three simulated nodes."""
    folder.mkdir(parents=True)
    wanted = plan(minutes)
    (folder / "plan.json").write_text(json.dumps(asdict(wanted)))
    script = Script(path=SCRIPT, args=(str(folder / "plan.json"),))
    with elastic(folder / "run", script, members=NODES, nodes=NODES) as process:
        finish(process, folder / "run", timeout_s=minutes * 60 * 3 + 600)
    run = read_run(folder / "run")
    return {"healthy_minutes": minutes, "healthy_steps": wanted.steps, "false_evictions": evictions(run)}


def evictions(run: Run) -> int:
    """Members that were left out of a view, or replaced: in a job without faults, all of them falsely."""
    seen = {member for view in run.views for member in view.members}
    out = {member for member in seen if run.view_without(member) is not None}
    replaced = set(run.replaces.values())
    return len(out | replaced)
