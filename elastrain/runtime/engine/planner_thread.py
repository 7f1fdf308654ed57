"""The thread in which the planner answers a question of the protocol core, and the memory that its answers keep to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from elastrain import protocol as p
from elastrain.job.world import View
from elastrain.memory.plan_check import lacking_bytes
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_choice import NoPlanFitsError, PlanAnswer, choose_fitting
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.runtime.io.loop_channel import LoopChannel
from elastrain.runtime.memory.memory_keeper import MemoryKeeper
from elastrain.runtime.tensors.executor import Executor

Decided = Callable[[p.ChoosePlan, PlanAnswer | None, str], None]
"""A function that is told of an answer and of its reason."""
SAFE_SHARE = 0.8
"""Part of the available memory that members without a limit may take."""


def memory_seen(keeper: MemoryKeeper | None, executor: Executor, loop: LoopChannel, view: View) -> p.MemorySeen:
    """Return the memory that this member holds and may hold. Members of a node share what is available there."""
    if keeper is not None and (seen := keeper.seen()) is not None:
        return p.MemorySeen(memory=seen)
    port = loop.landing.port
    held_bytes, available_bytes = port.memory_allocated()[0], port.mem_get_info()[0]
    sharers = max(Counter(view.nodes.values()).values())
    memory = ToldMemory(
        limit_bytes=held_bytes + int(SAFE_SHARE * available_bytes / sharers),
        base_bytes=max(0, held_bytes - executor.memory_bytes()),
        taken_bytes=held_bytes,
    )
    return p.MemorySeen(memory=memory)


def answer_later(
    command: p.ChoosePlan, tell: Callable[[p.Event], None], decided: Decided, keeper: MemoryKeeper | None
) -> None:
    """Answer a question in a thread of its own, and tell the engine. Does not wait. `keeper`: with a memory limit."""
    # The account is a value, while the engine's thread goes on with the keeper.
    account = None if keeper is None else keeper.work.account

    def lacking(plan: PipelinePlan) -> Mapping[str, int]:
        return {} if account is None else lacking_bytes(plan, account, command.told)

    # A planner that fails costs the better plan, and nothing else: the rule serves on.
    args = (command, tell, decided, lacking)
    threading.Thread(target=_answer, args=args, name="elastrain-planner", daemon=True).start()


def _answer(
    command: p.ChoosePlan,
    tell: Callable[[p.Event], None],
    decided: Decided,
    lacking: Callable[[PipelinePlan], Mapping[str, int]],
) -> None:
    answer: PlanAnswer | None = None
    try:
        answer = choose_fitting(command.question, lacking)
    except NoPlanFitsError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - edge of a thread
        reason = f"the planner has failed: {error!r}"
    else:
        reason = answer.reason
    decided(command, answer, reason)
    tell(p.Planned(generation=command.generation, present=command.present, answer=answer))
