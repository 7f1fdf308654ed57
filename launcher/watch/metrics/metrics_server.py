"""The process that serves a run's metrics over HTTP: `python -m elastrain.launcher.watch.metrics.metrics_server`.

It gets a listening socket, and asks the run's agents for the state when it is scraped, as `elastrain status` does. So
a slow or broken reader of metrics never holds an agent.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elastrain.errors import ElastrainError
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch.metrics.metric_table import METRICS, UP_HELP


class RunCollector(Collector):
    """The metrics of one run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of now. Without an answer, only `elastrain_up` is there, and is 0."""
        state = self._state()
        up = GaugeMetricFamily("elastrain_up", UP_HELP, labels=["job_id"])
        up.add_metric([state["job"] if state else ""], float(state is not None))
        yield up
        if state is None:
            return
        now = time.time()
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(f"elastrain_{metric.name}", metric.help, labels=["job_id", *metric.labels])
            for labels, value in metric.values(state, now):
                family.add_metric([state["job"], *labels], value)
            yield family

    def _state(self) -> dict[str, Any] | None:
        try:
            return operator_messages.state(self._run)
        except ElastrainError:
            return None


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print nothing: the screen belongs to the run."""


def serve(listener: socket.socket, run: RunDir) -> None:
    """Serve until the process is ended."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(run))
    server = _Server(listener.getsockname()[:2], _Silent, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()[:2]
    server.setup_environ()
    server.set_app(make_wsgi_app(registry))
    server.serve_forever()


def main(arguments: list[str]) -> None:
    """Serve the run in the folder `arguments[1]` on the socket with the descriptor `arguments[0]`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(arguments[0])), RunDir(path=Path(arguments[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
