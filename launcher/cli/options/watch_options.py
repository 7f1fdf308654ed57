"""Options for what a running job shows to programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from elastrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """Options for metrics."""

    heading: ClassVar = "Watching"

    metrics_port: Annotated[
        int | None,
        typer.Option("--metrics-port", min=1, max=65535, help="Serve metrics for Prometheus on this port."),
    ] = None
    metrics_addr: Annotated[
        str | None,
        typer.Option("--metrics-addr", help="This host's address for --metrics-port; default: loopback."),
    ] = None

    def metrics(self) -> tuple[str, int] | None:
        """Return the address and port of the metrics, or None if nothing is to be served. Raises ConfigError."""
        if self.metrics_port is None:
            if self.metrics_addr is not None:
                raise ConfigError("--metrics-addr is for metrics: give --metrics-port too")
            return None
        return self.metrics_addr or "127.0.0.1", self.metrics_port
