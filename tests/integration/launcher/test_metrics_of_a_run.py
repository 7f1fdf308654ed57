"""The metrics of a real run, scraped while it trains and gone with its end."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import pytest

from tests.support.free_ports import free_ports
from tests.support.nodes_harness import stub_job

pytest.importorskip("prometheus_client", reason="the extra `watch` is not installed")
pytestmark = pytest.mark.slow


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=180) as answer:
        text: str = answer.read().decode()
    return text


def test_a_loss_shows_in_the_metrics_and_nothing_is_served_afterwards(tmp_path: Path) -> None:
    port = free_ports()[0]
    with stub_job(tmp_path, "--standalone", "--nproc-per-node", "2", "--metrics-port", str(port)) as job:
        job.wait_step(2)
        assert "elastrain_members{" in scraped(port)
        job.kill("m1")
        job.wait_view(2)
        end_s = time.monotonic() + 90
        while 'member="m2"' not in (text := scraped(port)) and "elastrain_recovering" not in text:
            assert time.monotonic() < end_s, text
            time.sleep(0.1)
        assert job.finish().exit_code == 0
        job.assert_nothing_left()
    with pytest.raises(OSError):
        scraped(port)
