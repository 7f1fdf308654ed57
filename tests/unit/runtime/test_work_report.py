"""A worker's report about its share and memory: at most once a second, and never before its loop has begun."""

from __future__ import annotations

from elastrain.protocol.agent_messages import WorkTold
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.work_report import WorkReport


def test_nothing_is_reported_before_the_loop_has_begun() -> None:
    assert WorkReport(LoopHeartbeat(), print, lambda: 0.0).take() is None


def test_the_share_is_the_mean_since_the_last_report() -> None:
    now_s, whereabouts = [0.0], LoopHeartbeat()
    noted: list[str] = []
    report = WorkReport(whereabouts, lambda event, **fields: noted.append(event), lambda: now_s[0])
    report.measure(lambda: 7, 8)
    report.begin(100)
    whereabouts.computed(0.1)
    assert report.take() == WorkTold(until=100, micro_batches=1.0, memory_bytes=7, memory_limit_bytes=8)
    for count in (2, 3):
        for _ in range(count):
            whereabouts.computed(0.1)
        now_s[0] += 0.4
        assert report.take() is None
    now_s[0] += 0.4
    whereabouts.computed(0.1)
    told = report.take()
    assert told is not None and told.micro_batches == 2.0
    assert noted == ["work"] * 2, "the report of the run reads them"
