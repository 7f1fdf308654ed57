"""The thread in which the planner answers a question of the protocol core."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastrain import protocol as p
from elastrain.pipeline.planner.plan_choice import NoPlanFitsError, PlanAnswer, choose_plan
from elastrain.runtime.io.journal import Journal


def answer_later(command: p.ChoosePlan, tell: Callable[[p.Event], None], journal: Journal) -> None:
    """Answer a question in a thread of its own, and tell the engine. Does not wait."""
    # A planner that fails costs the better plan, and nothing else: the rule serves on.
    threading.Thread(target=_answer, args=(command, tell, journal), name="elastrain-planner", daemon=True).start()


def _answer(command: p.ChoosePlan, tell: Callable[[p.Event], None], journal: Journal) -> None:
    answer: PlanAnswer | None = None
    try:
        answer = choose_plan(command.question)
    except NoPlanFitsError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - edge of a thread
        reason = f"the planner has failed: {error!r}"
    else:
        reason = answer.reason
    is_new = answer is not None and answer.plan != command.question.present
    step_s = None if answer is None else answer.step_s
    journal.write("planned", generation=command.generation, is_new=is_new, step_s=step_s, reason=reason)
    tell(p.Planned(generation=command.generation, present=command.present, answer=answer))
