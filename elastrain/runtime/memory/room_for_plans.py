"""The questions of the engine to the keeper of a memory limit: whether a view, and a step, have room.

If they have none, the error names the member that lacks most, and not the first one that ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastrain import protocol as p
from elastrain.errors import NoRoomError
from elastrain.job.values import Record
from elastrain.member.parts import Machine
from elastrain.memory.plan_check import largest_lack
from elastrain.runtime.memory.memory_keeper import MemoryKeeper


def room_for_view(keeper: MemoryKeeper | None, machine: Machine, plan: p.Resumed) -> p.CopyBudgetSet | None:
    """Make room for the plan of a new view. Returns None without a limit. Raises NoRoomError if there is no room."""
    if keeper is None:
        return None
    with _largest_named(keeper, machine):
        return keeper.resumed(plan, machine.shape, machine.step.tasks.load())


def room_for_step(keeper: MemoryKeeper | None, machine: Machine) -> p.CopyBudgetSet | None:
    """Make room for the tasks of a step. Returns None if nothing changed. Raises NoRoomError if there is no room."""
    if keeper is None:
        return None
    roles = machine.commit.roles
    with _largest_named(keeper, machine):
        return keeper.begin(machine.step.tasks.load(), (roles.live, roles.target))


def room_after_step(keeper: MemoryKeeper | None, machine: Machine, record: Record) -> p.CopyBudgetSet | None:
    """Measure a committed step, and make room for what its record changes. Returns None if nothing changed.

    Raises NoRoomError if there is no room.
    """
    if keeper is None:
        return None
    roles = machine.commit.roles
    return keeper.passed(record, (roles.live, roles.target))


@contextmanager
def _largest_named(keeper: MemoryKeeper, machine: Machine) -> Iterator[None]:
    """Raise NoRoomError for the member that lacks most, as far as members have told of their memory.

    Members decide at about the same time, and the first that has no room ends the job. With its own lack alone the next
    start could end for the larger lack of another one.
    """
    try:
        yield
    except NoRoomError as error:
        account, own = keeper.work.account, keeper.work.lack
        told = machine.step.proposals.measures.memory
        found = None if account is None or own is None else largest_lack(account, machine.step.tasks.by_member(), told)
        if found is None or own is None or found[1].missing_bytes <= own.missing_bytes:
            raise
        raise NoRoomError(f"member {found[0]}: {found[1].reason}") from error
