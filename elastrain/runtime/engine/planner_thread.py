"""The thread in which the planner answers a question of the protocol core."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastrain import protocol as p
from elastrain.pipeline.planner.plan_choice import NoPlanFitsError, PlanAnswer, choose_plan

Decided = Callable[[p.ChoosePlan, PlanAnswer | None, str], None]
"""A function that is told of an answer and of its reason."""


def answer_later(command: p.ChoosePlan, tell: Callable[[p.Event], None], decided: Decided) -> None:
    """Answer a question in a thread of its own, and tell the engine. Does not wait."""
    # A planner that fails costs the better plan, and nothing else: the rule serves on.
    threading.Thread(target=_answer, args=(command, tell, decided), name="elastrain-planner", daemon=True).start()


def _answer(command: p.ChoosePlan, tell: Callable[[p.Event], None], decided: Decided) -> None:
    answer: PlanAnswer | None = None
    try:
        answer = choose_plan(command.question)
    except NoPlanFitsError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - edge of a thread
        reason = f"the planner has failed: {error!r}"
    else:
        reason = answer.reason
    decided(command, answer, reason)
    tell(p.Planned(generation=command.generation, present=command.present, answer=answer))
