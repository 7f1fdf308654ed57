"""Options for the memory limit of workers, for timeouts of a job, and for injected faults."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.agent.worker_start import (
    HOST_MEMORY_LIMIT,
    HOST_TIER,
    MEMORY_LIMIT,
    OFFLOAD_DIRS,
    WorkerWish,
)
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.faults.grammar import read_faults
from elastrain.launcher.faults.table import CLASSES, Carrier
from elastrain.launcher.shared.process_environment import inherited
from elastrain.launcher.start.run_options import KEY_TTL_S, Waits
from elastrain.offload.drives.directories import try_directory
from elastrain.offload.errors import OffloadConfigError

SECONDS_OF_A_YEAR = 365 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """Options for the memory limits of each worker, and for the places that take what exceeds them."""

    heading: ClassVar = "Memory"

    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit",
            help="What each worker may hold in memory, as 4G or 512M: in its device's, if it trains on one; default: "
            "no limit.",
        ),
    ] = None
    host_memory_limit: Annotated[
        str | None,
        typer.Option(
            "--host-memory-limit",
            help="What each worker may hold in host memory if it trains on a device, --host-tier included.",
        ),
    ] = None
    host_tier: Annotated[
        str | None,
        typer.Option(
            "--host-tier", help="Host memory for what leaves a worker's device, before it goes to --offload-dir."
        ),
    ] = None
    offload_dir: Annotated[
        list[Path] | None,
        typer.Option(  # `limit` checks it, and reports problems in one sentence
            "--offload-dir",
            readable=False,
            help="Directory on an SSD for what does not fit into --memory-limit; repeatable.",
        ),
    ] = None

    def limit(self) -> WorkerWish:
        """Return the checked options. Workers inherit what is not given from the environment. Raises ConfigError."""
        own = WorkerWish(
            bytes_per_worker=_bytes(self.memory_limit, "--memory-limit"),
            host_bytes_per_worker=_bytes(self.host_memory_limit, "--host-memory-limit"),
            host_tier_bytes=_bytes(self.host_tier, "--host-tier"),
            offload_dirs=tuple(each.absolute() for each in self.offload_dir or ()),
        )
        source = "--offload-dir" if own.offload_dirs else OFFLOAD_DIRS
        around = inherited(OFFLOAD_DIRS).split(os.pathsep)
        named = self.offload_dir or [Path(each) for each in around if each]
        is_limited = own.bytes_per_worker is not None or bool(inherited(MEMORY_LIMIT))
        if (own.host_tier_bytes or inherited(HOST_TIER)) and not is_limited:
            raise ConfigError(
                "--host-tier is host memory for what a limit of device memory leaves no room for: give --memory-limit "
                "too"
            )
        is_limited = is_limited or own.host_bytes_per_worker is not None or bool(inherited(HOST_MEMORY_LIMIT))
        if named and not is_limited:
            raise ConfigError(
                f"{source} {named[0]} is for what a memory limit leaves no room for: give --memory-limit too"
            )
        for each in named:
            try:
                try_directory(each)
            except OffloadConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
        return own


@dataclass(frozen=True, kw_only=True)
class WaitFlags:
    """Options for timeouts, in seconds."""

    heading: ClassVar = "Time limits"

    join_timeout: Annotated[
        float,
        typer.Option(
            "--join-timeout", min=0.1, help="Seconds for MIN nodes to come, and from the first worker to the last."
        ),
    ] = 120.0
    last_call: Annotated[
        float, typer.Option("--last-call", min=0.0, help="Seconds that more nodes are waited for once MIN are there.")
    ] = 5.0
    park_timeout: Annotated[
        float,
        typer.Option(
            "--park-timeout", min=0.1, help="Seconds to wait for a store, or for nodes, without which nothing goes on."
        ),
    ] = 3600.0
    hang_timeout: Annotated[
        float,
        typer.Option(
            "--hang-timeout",
            min=0.0,
            help="Seconds without a sign of life after which a member that others wait for is ended, or 2.5 median "
            "steps; 0: none is (for a debugger).",
        ),
    ] = 2.5
    key_ttl: Annotated[
        float | None,
        typer.Option(
            "--key-ttl",
            min=1.0,
            help="Seconds after which etcd forgets a job whose agents were all killed; more than --park-timeout. "
            "Default: 12 hours, or twice --park-timeout.",
        ),
    ] = None
    stop_grace: Annotated[
        float,
        typer.Option(
            "--stop-grace",
            "--shutdown-timeout",
            "--shutdown_timeout",
            min=0.0,
            help="Seconds from SIGTERM to SIGKILL when the job is stopped.",
        ),
    ] = 5.0

    def waits(self) -> Waits:
        """Return the checked timeouts. Raises ConfigError."""
        for field in fields(self):
            # The kernel and etcd reject some numbers: infinity would crash a running agent.
            if (value := getattr(self, field.name)) is not None and value > SECONDS_OF_A_YEAR:
                option = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{option} {value:g}: at most {SECONDS_OF_A_YEAR:.0f} seconds, which are a year")
        if self.key_ttl is not None and self.key_ttl <= self.park_timeout:
            raise ConfigError(
                f"--key-ttl {self.key_ttl:g}: it must be more than --park-timeout ({self.park_timeout:g}), lest the "
                "job's keys go while a node still waits for them"
            )
        return Waits(
            join_timeout_s=self.join_timeout,
            last_call_s=self.last_call,
            stop_grace_s=self.stop_grace,
            park_timeout_s=self.park_timeout,
            hang_timeout_s=self.hang_timeout,
            key_ttl_s=self.key_ttl if self.key_ttl is not None else max(KEY_TTL_S, 2 * self.park_timeout),
        )


@dataclass(frozen=True, kw_only=True)
class FaultFlags:
    """Options for fault injection."""

    heading: ClassVar = "Failures on purpose"

    inject: Annotated[bool, typer.Option("--inject", help="Arm fault injection: allow `elastrain inject`.")] = False
    faults: Annotated[
        Path | None, typer.Option("--faults", help="Faults to inject, a line each as after `elastrain inject`; arms.")
    ] = None

    @property
    def armed(self) -> bool:
        """True if faults may be injected."""
        return self.inject or self.faults is not None

    def check(self, *, has_launcher: bool) -> None:
        """Raise ConfigError if a fault needs simulated nodes and the job has none."""
        around = next((f for f in self.read() if CLASSES[f.kind].by is Carrier.LAUNCHER), None)
        if around is not None and not has_launcher:
            raise ConfigError(f"{self.faults}: {around.kind} needs simulated nodes: say --local-nodes N")

    def read(self) -> tuple[Fault, ...]:
        """Return the faults in the file of --faults. Raises ConfigError."""
        return read_faults(self.faults) if self.faults is not None else ()


def _bytes(text: str | None, option: str) -> int | None:
    return None if text is None else size_bytes(text, option)


def size_bytes(text: str, option: str) -> int:
    """Return the bytes that an option's text such as 4G stands for. Raises ConfigError."""
    found = re.fullmatch(r"([1-9]\d*)([KMGT]?)(?:i?B)?", text)
    if found is None:
        raise ConfigError(f"{option} {text!r}: write a whole number of bytes, or of K, M, G or T, such as 4G")
    return int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[found[2]]
