"""Plans that a job is told in place of its own rule and planner, and what its members have measured meanwhile.

For a process of the job: call `steer` before `elastrain.init`. Everything else is the product's own: a plan takes
effect through a record, blocks move by publishes, and a recovery computes again what is missing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elastrain import protocol as p
from elastrain.member.pipeline import assignments, proposals
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_choice import PlanAnswer
from elastrain.pipeline.planner.step_profile import JobProfile
from elastrain.runtime.engine import engine


@dataclass(frozen=True, kw_only=True)
class Steering:
    """The plan of the first step, and that of the members which are left after a loss. None: the rule's."""

    first: PipelinePlan | None = None
    after: PipelinePlan | None = None
    asks: bool = False
    """True if the planner of the job answers as ever."""
    then: PipelinePlan | None = None
    """The planner's answer, once it is asked. None: it is never answered."""
    pause_s: float = 0.0
    """Seconds until an answer. If it is not 0, every question is answered, with `then` and `first` in turns."""
    is_at_once: bool = False
    """True if a plan holds at once, so that no member is a shadow first."""


def steer(path: Path) -> None:
    """Let this process take its plans from a file, and write the profiles that it would ask the planner about."""
    steering = msgspec.json.decode(path.read_bytes(), type=Steering)
    for module in (assignments, proposals):
        if steering.first is not None:
            module.first_plan = lambda *_: steering.first  # type: ignore[attr-defined]
    if steering.after is not None:
        proposals.next_plan = lambda *_: steering.after  # type: ignore[attr-defined]
    if steering.is_at_once:
        proposals.begun = lambda _, wanted, *__: wanted  # type: ignore[attr-defined]
    if steering.then is not None:
        engine.answer_later = _answering(steering.then, steering.first if steering.pause_s else None, steering.pause_s)
    elif not steering.asks:
        engine.answer_later = _write_profile


def _write_profile(command: p.ChoosePlan, *_: Any) -> None:
    folder, me = Path(os.environ["ELASTRAIN_RUN_DIR"]), os.environ["ELASTRAIN_MEMBER"]
    (folder / f"profile-{me}.json").write_bytes(msgspec.json.encode(command.question.profile))


def _answering(then: PipelinePlan, first: PipelinePlan | None, pause_s: float) -> Callable[..., None]:
    """Answer with `then`, or with `first` where that holds already."""

    def answer(command: p.ChoosePlan, tell: Callable[[p.Event], None], *_: Any) -> None:
        holds = command.question.present.pipelines == then.pipelines
        answer = PlanAnswer(plan=first if holds and first else then, step_s=1.0, reason="the experiment wants it")
        planned = p.Planned(generation=command.generation, present=command.present, answer=answer)
        later = threading.Timer(pause_s, tell, [planned])
        later.daemon = True
        later.start()

    return answer


def profile(folder: Path) -> JobProfile:
    """Return the profile that the first member of a job has asked about."""
    return msgspec.json.decode((folder / "profile-m0.json").read_bytes(), type=JobProfile)
