"""A dashboard for Grafana with one panel for each metric."""

from __future__ import annotations

from typing import Any

from elastrain.launcher.watch.metrics.metric_table import METRICS, Metric

_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 7


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it. The data source and the job are chosen in it."""
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": "elastrain",
        "uid": "elastrain",
        "schemaVersion": 39,
        "version": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["elastrain"],
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "job",
                    "label": "Job",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(elastrain_up, job_id)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": [_panel(number, metric, source) for number, metric in enumerate(METRICS)],
    }


def _panel(number: int, metric: Metric, source: dict[str, str]) -> dict[str, Any]:
    chosen = f'{metric.served_name}{{job_id=~"$job"}}'
    query = f"rate({chosen}[1m])" if metric.kind == "counter" else chosen
    place = {"w": _WIDTH, "h": _HEIGHT, "x": number % _COLUMNS * _WIDTH, "y": number // _COLUMNS * _HEIGHT}
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels) or "{{job_id}}"
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": metric.help.rstrip(".") + (" (per second)" if metric.kind == "counter" else ""),
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": metric.unit}, "overrides": []},
        "targets": [{"refId": "A", "expr": query, "legendFormat": legend, "datasource": source}],
    }
