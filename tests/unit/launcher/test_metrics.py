"""Metrics of a run: their table, what is served over HTTP, the dashboard, and a port that is taken."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from docs import metrics as metrics_page
from elastrain.errors import ConfigError
from elastrain.launcher.cli import command_line
from elastrain.launcher.cli.options.watch_options import WatchFlags
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.operator_messages import NoAnswerError
from elastrain.launcher.shared.rundir import RunDir
from elastrain.launcher.watch.metrics.grafana import dashboard
from elastrain.launcher.watch.metrics.metric_table import METRICS
from elastrain.launcher.watch.metrics.metrics_process import metrics
from tests.support.watched import NOW, a_state

LOOPBACK = "127.0.0.1"


def value_of(name: str, **changed: Any) -> list[tuple[tuple[str, ...], float]]:
    (metric,) = [each for each in METRICS if each.name == name]
    return list(metric.values(a_state(**changed), NOW))


def test_every_metric_has_a_sample_or_none_in_every_state() -> None:
    for metric in METRICS:
        for state in (a_state(), a_state(step=None, loss=None, members=[], checkpoint=None, checkpoint_ago_s=None)):
            assert all(len(labels) == len(metric.labels) for labels, _ in metric.values(state, NOW))


def test_values_are_those_of_status() -> None:
    assert value_of("steps") == [((), 42.0)] and value_of("steps", step=None) == []
    assert value_of("member_share") == [(("m0", "node0"), 0.5), (("m1", "node0"), 0.5)]
    assert value_of("parked_seconds") == [((), 0.0)] and value_of("parked_seconds", parked_s=3.0) == [((), 3.0)]
    assert value_of("window_shards", window={"shards": {"1": 1, "2": 1}, "since_step": 1, "since_s": 1.0}) == [
        ((), 2.0)
    ]


def test_names_are_unique_and_as_prometheus_wants_them() -> None:
    names = [metric.served_name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(
        re.fullmatch("[a-z_]+", name) and metric.help.endswith(".") for name, metric in zip(names, METRICS, strict=True)
    )


def test_the_page_lists_all_of_them() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run `python -m docs.metrics`"


def test_the_dashboard_asks_for_each_metric_once() -> None:
    board = json.loads(json.dumps(dashboard()))
    asked = [panel["targets"][0]["expr"] for panel in board["panels"]]
    assert len(asked) == len(METRICS)
    assert all(metric.served_name in query for metric, query in zip(METRICS, asked, strict=True))
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(METRICS)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[int]:
    pytest.importorskip("prometheus_client", reason="the extra `watch` is not installed")
    from elastrain.launcher.watch.metrics.metrics_server import serve

    listener = socket.create_server((LOOPBACK, 0))
    threading.Thread(target=serve, args=(listener, RunDir(path=tmp_path)), daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_help_type_and_values_are_served(served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_messages, "state", lambda run: a_state())
    text = scraped(served)
    assert "# HELP elastrain_steps_total Committed steps of the job.\n# TYPE elastrain_steps_total counter" in text
    assert 'elastrain_steps_total{job_id="job"} 42.0' in text
    assert 'elastrain_member_memory_bytes{job_id="job",member="m1",node="node0"} 5e+07' in text
    assert 'elastrain_up{job_id="job"} 1.0' in text


def test_a_run_that_does_not_answer_is_down(served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: RunDir) -> dict[str, Any]:
        raise NoAnswerError("silence")

    monkeypatch.setattr(operator_messages, "state", silent)
    text = scraped(served)
    assert 'elastrain_up{job_id=""} 0.0' in text and "steps_total" not in text


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `watch` is not installed")
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(9)\n")
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["run", "--metrics-port", port, "--run-dir", str(tmp_path / "run"), str(script)]
        done = CliRunner().invoke(command_line.app, words)
    assert done.exit_code == 2 and f"--metrics-port {port} is taken on {LOOPBACK}: choose another one" in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_address_of_another_host_and_an_address_without_a_port(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `watch` is not installed")
    refused = pytest.raises(ConfigError, match=r"--metrics-port 9100 on 192\.0\.2\.1 cannot be opened")
    with refused, metrics(("192.0.2.1", 9100), tmp_path):
        pass
    with pytest.raises(ConfigError, match="give --metrics-port too"):
        WatchFlags(metrics_addr=LOOPBACK).metrics()


def test_the_process_ends_with_the_job(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="the extra `watch` is not installed")
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    with metrics((LOOPBACK, port), tmp_path):
        assert "elastrain_up" in scraped(port)
    with pytest.raises(OSError):
        scraped(port)


def test_the_command_writes_the_dashboard(tmp_path: Path) -> None:
    out = tmp_path / "dashboard.json"
    assert CliRunner().invoke(command_line.app, ["report", "--grafana", "--out", str(out)]).exit_code == 0
    assert json.loads(out.read_text())["title"] == "elastrain"
