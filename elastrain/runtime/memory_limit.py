"""What a member may hold in memory, as it was told, and where what does not fit may go."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.errors import ConfigError
from elastrain.offload.engines.posix import Calls


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """`limit_bytes` is what this process may hold in memory; `directories` are on SSDs, empty for none."""

    limit_bytes: int
    directories: tuple[str, ...] = ()
    calls: Calls | None = None
    """The kernel's calls on files there, where faults on request take their place."""

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
