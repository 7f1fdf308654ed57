"""States of a run as agents tell them, for tests of what people see."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.core import Core
from elastrain.launcher.shared.job_values import JobConfig
from elastrain.launcher.shared.notices import MemberWork

NOW = 1_800_000_000.0


def a_member(name: str, **changed: Any) -> dict[str, Any]:
    known = {"rank": 0, "id": name, "node": "node0", "pid": 7, "state": "member", "step": 41}
    return {**known, "waits_for": "", "digest": "", "replaces": "", **asdict(MemberWork()), **changed}


def a_state(**changed: Any) -> dict[str, Any]:
    """A job in the middle, with two members."""
    fresh = describe(Core(JobConfig(workers=2), (), choose=lambda members: members[0]), "job", 0.0)
    work = {"micro_batches": 4.0, "micro_batch_s": 0.25, "memory_bytes": 50_000_000, "memory_limit_bytes": 100_000_000}
    members = [a_member(f"m{rank}", rank=rank, **work) for rank in range(2)]
    running = {"state": "running", "at": NOW, "step": 41, "until": 100, "loss": 0.25, "members": members}
    pace = {"steps_per_minute": 30.0, "remaining_s": 118.0, "checkpoint": 40, "checkpoint_ago_s": 10.0}
    return {**fresh, **running, **pace, "redundancy": "every shard survives the loss of 1 more", **changed}
