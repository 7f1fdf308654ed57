"""The whole optimizer state in the form of plain PyTorch: what a script saves, and what it has loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.job.layout import Layout, Shard
from elastrain.pipeline.stubs.naming import plain_name
from elastrain.runtime.durable.by_name import optimizer_pieces
from elastrain.runtime.durable.manifests import Described
from elastrain.runtime.io.loop_channel import LoopChannel
from elastrain.runtime.loop.step import Step
from elastrain.snapshot.digest import combine, digest
from elastrain.snapshot.durable.plain import Gathering
from elastrain.snapshot.shard_state import ShardState, Value

Loaded = Mapping[Tensor, Mapping[str, Value]]
"""State of the optimizer by parameter, as torch.optim keeps it."""


class WholeState:
    """Reader of the whole state between two steps, from its holders."""

    def __init__(
        self, layout: Layout, described: Described, model: nn.Module, handover: LoopChannel, life: int = 1
    ) -> None:
        self.step: Callable[[], Step | None] = lambda: None
        """Returns the present step of the loop."""
        self.is_first_life = life == 1
        """False if the job goes on from a checkpoint of its own, so that no loaded state may count instead."""
        self._layout = layout
        self._described = described
        self._names = {plain_name(n): q for n, q in model.named_parameters(remove_duplicate=False)}
        self._handover = handover

    def of_optimizer(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of every parameter, in new memory. Other members do not wait.

        Raises ConfigError within a step, because its update is under way, and after the loop.
        """
        state = self._gathered("optimizer.state_dict()", with_values=False).state()
        return {self._names[name]: dict(its) for name, its in state.items()}

    def of_model(self) -> dict[str, Tensor]:
        """Return all parameters and running statistics by name. Raises as `of_optimizer`."""
        return self._gathered("model.state_dict()", with_values=True).parameters()[0]

    def _gathered(self, what: str, *, with_values: bool) -> Gathering:
        step = self.step()
        if self._handover.has_ended:
            raise ConfigError(
                f"{what} comes too late behind the loop over job.steps(…), where the members have let go of the state: "
                "call it in the body of the loop, at the latest in that of the last step"
            )
        if step is not None and step.is_under_way:
            raise ConfigError(
                f"{what} was called inside `for batch in step` of step {step.number}, whose update is still to come: "
                "call it behind that loop"
            )
        gathering, taken = self._described.gathering(), set[int]()

        def gather(state: ShardState, is_intact: Callable[[], bool]) -> bool:
            if state.shard in taken:  # a holder may answer twice around a loss
                return True
            if not gathering.add(state, with_values=with_values, is_intact=is_intact):
                return False
            taken.add(state.shard)
            return True

        self._handover.fetch_states(gather)
        return gathering

    def digest(self, loaded: Loaded, *, is_whole: bool) -> str:
        """Return a digest of a loaded state and its names. `is_whole`: the parameters themselves belong to it."""
        found = [digest(q.detach().contiguous()) for _, q in sorted(self._names.items()) if is_whole]
        for name, parameter in sorted(self._names.items()):
            for entry, value in sorted(loaded.get(parameter, {}).items()):
                words = f"{name} {entry} {None if isinstance(value, Tensor) else value!r}".encode()
                found.append(int.from_bytes(blake2b(words, digest_size=8).digest(), "little"))
                found += [digest(value.detach().contiguous())] if isinstance(value, Tensor) else []
        return f"{combine(found):016x}"

    def cut(self, loaded: Loaded) -> Callable[[Shard], list[dict[str, Any]]]:
        """Return a function that cuts a loaded state into the pieces of a shard, on the parameters' device."""
        named = {spec.name: self._names[spec.name] for spec in self._layout.parameters if spec.name in self._names}
        states = {name: loaded[parameter] for name, parameter in named.items() if parameter in loaded}
        device = next(iter(named.values())).device

        def pieces(shard: Shard) -> list[dict[str, Any]]:
            dtype: torch.dtype = getattr(torch, shard.master_dtype)

            def placed(value: Value) -> Value:
                if not isinstance(value, Tensor) or not value.dim():
                    return value
                return value.to(device, dtype if value.is_floating_point() else value.dtype)

            cut = optimizer_pieces(states, self._layout, shard)
            return [{name: placed(value) for name, value in piece.items()} for piece in cut]

        return pieces
