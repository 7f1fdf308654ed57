"""Keeps a member within its memory limit: measures, asks `elastrain.memory_budget`, and lets leave what has to.

The engine's thread measures and decides, after every step and whenever a view is in order; the main thread enters
`computing()` around each micro-batch. No decision is made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from elastrain import memory_budget as budget
from elastrain.errors import ConfigError, NoRoomError
from elastrain.fold import Node, leaves
from elastrain.ledger import BEHIND_BYTES
from elastrain.offload.device import Device
from elastrain.offload.engines.posix import PosixEngine
from elastrain.offload.errors import LimitTooSmallError, OffloadConfigError
from elastrain.offload.hooks import ActivationOffload, OffloadConfig
from elastrain.offload.policy import IN_FLIGHT_STORAGES
from elastrain.offload.profile import Occupancy, Profile
from elastrain.offload.sharing import shared
from elastrain.plan import plan
from elastrain.runtime.executor import Executor
from elastrain.runtime.memory import PeakMeter, give_freed_memory_back
from elastrain.standing import COPY_BUDGET_BYTES
from elastrain.values import Recovery
from elastrain.world import View

if TYPE_CHECKING:
    from elastrain.comm.wire.mesh import Mesh
    from elastrain.lifecycle import Lifecycle
    from elastrain.runtime.journal import Journal

MEASURED_STEPS = 8
"""What computing takes beside what is counted: the most of so many steps."""
SETTLED_STEPS = 2
"""From this step of a plan on, what it took is what it takes."""
ASSUMED_MOMENTS = 2.0
"""Optimizer state per parameter until it was measured: Adam's."""
COPY_SHARE = 16
"""Of the parameters, one such part at least is copied per step towards new holders, whatever memory is left."""
WORTH_TELLING = 0.05
"""Memory that becomes free is given to activations from this share of the limit on."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """`limit_bytes` is what this process may hold in memory; `directories` are on SSDs, empty for none."""

    limit_bytes: int
    directories: tuple[str, ...] = ()

    @staticmethod
    def of(limit_bytes: int | None, directories: tuple[str, ...]) -> MemoryLimit | None:
        """None without a limit. Raises ConfigError for directories without one: nothing would ever go there."""
        if limit_bytes is None and directories:
            raise ConfigError(
                f"{directories[0]} is for what a memory limit leaves no room for: give one too (--memory-limit), or "
                "leave the directory out (--offload-dir)"
            )
        return None if limit_bytes is None else MemoryLimit(limit_bytes=limit_bytes, directories=directories)

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ConfigError(f"memory_limit must be a positive number of bytes; got {self.limit_bytes}")


class MemoryKeeper:
    """One member's memory. Raises ConfigError if a directory can not be used."""

    def __init__(self, config: MemoryLimit, *, me: str, executor: Executor, mesh: Mesh, journal: Journal) -> None:
        give_freed_memory_back()
        self._config = config
        self._me = me
        self._executor = executor
        self._journal = journal
        self._meter = PeakMeter(mesh.shared_bytes)
        self._base_bytes: deque[int] = deque(maxlen=MEASURED_STEPS)
        self._last: budget.Fit | None = None
        self._held: tuple[budget.Held, ...] = ()
        self._needs: budget.Needs | None = None
        self._steps_in_view = self._measured_steps = self._expected_bytes = 0
        self._share = 1
        self._offload: ActivationOffload | None = None
        self._devices: tuple[Device, ...] = ()
        if config.directories:
            self._open(config.directories)

    def _open(self, directories: Sequence[str]) -> None:
        try:
            offload = ActivationOffload(OffloadConfig(dirs=tuple(directories)), describe=self._described)
            self._devices = tuple(Device(shared(PosixEngine(each), each), threads=0) for each in directories)
        except OffloadConfigError as error:
            raise ConfigError(str(error)) from None
        self._offload = offload

    # ------------------------------------------------------------------------------------------- for the training loop

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around one micro-batch. Raises NoRoomError where its activations can not be held within the limit."""
        if self._offload is None:
            yield
            return
        with self.named_errors():
            self._offload.__enter__()
        try:
            yield
        finally:
            self._offload.__exit__(None, None, None)

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Around backward. Raises NoRoomError where its activations can not be held within the limit."""
        try:
            yield
        except LimitTooSmallError as error:
            raise NoRoomError(
                f"member {self._me}: "
                + budget.too_small(
                    self._config.limit_bytes,
                    needed_bytes=error.smallest_bytes,
                    left_bytes=error.limit_bytes,
                    share=self._share,
                )
            ) from error

    # ------------------------------------------------------------------------------------------------- for the engine

    def resumed(self, view: View, core: Lifecycle, recovery: Recovery) -> None:
        """The view is in order: make room for its plan. Raises NoRoomError if there is none."""
        if not self._measured_steps:
            self._meter.look()  # what starting took for a moment is no step's
        shape = core.shape
        own = frozenset(node for partials in core.attempt.own for node in partials.nodes)
        is_checked = core.attempt.recomputes > 0 or shape.cross_check_every > 0
        slots = max(
            budget.slots_needed(shape.runs, (), plan(view.ids, shape.runs)[self._me], is_checked=is_checked),
            budget.slots_needed(shape.runs, own, _left_to_do(recovery.runs[self._me], own)),
        )
        moments = self._executor.states.moments() or ASSUMED_MOMENTS
        self._held = budget.held_by(
            self._me, (core.now, core.goal), shape.sizes, moments=moments, masters=self._executor.model.has_masters
        )
        expected_bytes = slots * self._executor.slot_bytes + self._sums_bytes(len(view.members))
        # What was expected of the last plan and what it took are both known: only the difference is a guess.
        gradients_bytes = expected_bytes
        if self._steps_in_view >= SETTLED_STEPS:
            held_bytes = self._executor.gradients_bytes()
            gradients_bytes = held_bytes + max(0, expected_bytes - self._expected_bytes)
        self._expected_bytes, self._steps_in_view = expected_bytes, 0
        least_bytes = max(*shape.sizes, sum(shape.sizes) // COPY_SHARE)
        core.copy_budget_bytes = budget.copy_budget(
            self._config.limit_bytes,
            self._needs_with(gradients_bytes),
            members=len(view.members),
            state_per_parameter=1 + moments,
            least_bytes=min(least_bytes, COPY_BUDGET_BYTES),
            most_bytes=COPY_BUDGET_BYTES,
        )
        copying_bytes = round(2 * core.copy_budget_bytes * (1 + moments)) if core.goal != core.now else 0
        self._decide(gradients_bytes + copying_bytes)

    def passed(self) -> None:
        """A step was committed: measure what it took. Raises NoRoomError if it took too much."""
        peak_bytes = self._meter.look()
        if self._needs is None:
            return
        activations_bytes = 0
        if self._offload is not None and (last := self._offload.stats().last) is not None:
            activations_bytes = last.peak_bytes
        self._steps_in_view += 1
        self._measured_steps += 1
        if self._measured_steps == SETTLED_STEPS:  # the first step warms up, and spills everything to learn
            self._base_bytes.clear()
        self._base_bytes.append(max(0, peak_bytes - self._executor.memory_bytes() - activations_bytes))
        self._journal.write("memory", peak_bytes=peak_bytes, activations_bytes=activations_bytes)
        gradients_bytes = self._needs.gradients_bytes
        if self._steps_in_view >= SETTLED_STEPS:
            gradients_bytes = min(gradients_bytes, self._executor.gradients_bytes())
        self._decide(gradients_bytes, budget.Measured(peak_bytes=peak_bytes, activations_bytes=activations_bytes))

    def close(self) -> None:
        """Give the space on disk back; states that lie there are gone."""
        if self._offload is not None:
            self._offload.close()
        for device in self._devices:
            device.close()

    # --------------------------------------------------------------------------------------------------------- inside

    def _sums_bytes(self, members: int) -> int:
        """As a primary: sums on the way, scratch of updates. As a backup: kept gradients of two steps, scratch."""
        primary_bytes = sum(each.parameters_bytes for each in self._held if each.is_primary)
        backup_bytes = sum(each.parameters_bytes for each in self._held if not each.is_primary)
        return (1 + budget.sums_needed(members)) * primary_bytes + 2 * backup_bytes + BEHIND_BYTES

    def _decide(self, gradients_bytes: int, measured: budget.Measured | None = None) -> None:
        """`measured` is a step under the present plan; None when the plan is a new one."""
        self._needs = needs = self._needs_with(gradients_bytes)
        limit_bytes = self._config.limit_bytes
        decided = budget.fit_plan(
            limit_bytes,
            needs,
            has_disk=bool(self._devices),
            disk_bytes_per_s=sum(device.rate_bytes_per_s() for device in self._devices) or 1.0,
        )
        if measured is not None and self._last is not None:
            decided = budget.settle(limit_bytes, self._last, decided, measured)
        if isinstance(decided, budget.Shortfall):
            self._journal.write("no_room", reason=decided.reason, **asdict(needs))
            raise NoRoomError(f"member {self._me}: {decided.reason}")
        if measured is None or self._is_news(decided) or self._share != self._share_of_activations():
            self._carry_out(decided, needs)

    def _needs_with(self, gradients_bytes: int) -> budget.Needs:
        executor = self._executor
        base_bytes = max(self._base_bytes, default=max(0, self._meter.now_bytes - executor.memory_bytes()))
        saved_bytes = largest_bytes = 0
        if self._offload is not None and (last := self._offload.stats().last) is not None:
            saved_bytes = last.saved_bytes
            largest_bytes = max((each.size_bytes for each in last.lifetimes), default=0)
        shards_bytes = sum(each.leaves_bytes for each in self._held)
        largest_shard_bytes = max((each.leaves_bytes for each in self._held), default=0)
        return budget.Needs(
            base_bytes=base_bytes,
            parameters_bytes=executor.model.nbytes,
            gradients_bytes=gradients_bytes,
            shards_bytes=shards_bytes,
            shards_least_bytes=min(shards_bytes, 2 * largest_shard_bytes),
            activations_bytes=saved_bytes,
            activations_least_bytes=min(saved_bytes, (IN_FLIGHT_STORAGES + 1) * largest_bytes),
            is_measured=self._measured_steps > 0,
        )

    def _is_news(self, decided: budget.Fit) -> bool:
        """Within a view, memory is given back to activations only where it is worth it, and to shards never."""
        last = self._last
        if last is None or decided.shards_on_disk_bytes > last.shards_on_disk_bytes:
            return True
        more_bytes = decided.activations_bytes - last.activations_bytes
        return more_bytes < 0 or more_bytes > WORTH_TELLING * self._config.limit_bytes

    def _share_of_activations(self) -> int:
        """Until it is known what computing takes beside saved activations, half of their room is left for it.

        The second step takes more than the first one, because optimizer state has come into being.
        """
        return 1 if self._measured_steps >= SETTLED_STEPS else 2

    def _carry_out(self, decided: budget.Fit, needs: budget.Needs) -> None:
        self._last = decided
        outside, which = budget.choose_shards(self._held, decided.shards_on_disk_bytes)
        reason = f"{decided.reason}; {which}" if outside else decided.reason
        self._executor.keep_outside(self._devices, outside)
        if self._offload is not None:
            self._share = self._share_of_activations()
            self._offload.set_memory_limit(max(1, decided.activations_bytes // self._share))
        self._journal.write(
            "room",
            reason=reason,
            activations_bytes=decided.activations_bytes,
            shards_on_disk=len(outside),
            **{f"need_{name}": value for name, value in asdict(needs).items()},
        )

    def _described(self, activations: Profile) -> Profile:
        """The profile of the activations, with what else this member holds."""
        executor, needs = self._executor, self._needs
        memory_bytes, disk_bytes = executor.states_bytes()
        places = (
            Occupancy(what="parameters", memory_bytes=executor.model.nbytes, disk_bytes=0),
            Occupancy(what="gradients and sums", memory_bytes=executor.gradients_bytes(), disk_bytes=0),
            Occupancy(what="optimizer shards", memory_bytes=memory_bytes, disk_bytes=disk_bytes),
            Occupancy(what="everything else", memory_bytes=needs.base_bytes if needs else 0, disk_bytes=0),
        )
        stats = activations.stats
        shard_devices = tuple(device.stats() for device in self._devices)
        return replace(
            activations,
            stats=replace(stats, devices=(*stats.devices, *shard_devices)),
            places=(*activations.places, *places),
        )


def _left_to_do(runs: Sequence[int], own: frozenset[Node]) -> list[int]:
    done = leaves(own)
    return [run for run in runs if run not in done]
