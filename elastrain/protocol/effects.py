"""What commands do to the model's parameters."""

from __future__ import annotations

from typing import Any

from elastrain.protocol.work import Apply, Bind, TakeParameters


def overwrites(command: Any) -> tuple[int, ...]:
    """The shards whose parameters in the model this command replaces by a state's, or by published ones."""
    match command:
        case Apply():
            return command.shards
        case Bind() | TakeParameters():
            return (command.shard,)
        case _:
            return ()
