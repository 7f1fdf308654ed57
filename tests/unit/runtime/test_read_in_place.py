"""The decision whether peers read device memory in place: one probe for all workers on a device, and reasons."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastrain.device.device_sharing import PROVIDERS, SharingError
from elastrain.device.same_memory import HOST
from elastrain.device.sharing_probe import ReadableDevices
from elastrain.runtime.carrying import in_place
from elastrain.runtime.carrying.in_place import shared_device_memory

KIND = "meta"
PORT: Any = SimpleNamespace(is_host=False, device=torch.device(KIND, 0), mem_get_info=lambda: (1, 1))


class Fake:
    """Shareable memory of the first of two devices."""

    segment_bytes, page_bytes, identities = 1 << 20, 4096, ("a", "b")

    def __init__(self, index: int) -> None:
        self.index = index


class Refusing:
    """A device whose memory cannot be shared."""

    def __init__(self, index: int) -> None:
        raise SharingError("it has no virtual memory")


class Node:
    """The workers of one node: what they write into their journals, and the probe that they run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, provider: str = "Fake") -> None:
        self.told: list[dict[str, object]] = []
        self.probes: list[tuple[str, int]] = []
        self.found = ReadableDevices(readable=(0, 1))
        self._folder = folder
        monkeypatch.setitem(PROVIDERS, KIND, f"{__name__}:{provider}")
        monkeypatch.setattr(in_place, "probe", self._probe)

    def _probe(self, provider: str, index: int, limit_s: float) -> ReadableDevices:
        self.probes.append((provider, index))
        time.sleep(0.05)
        return self.found

    def decide(self, **how: Any) -> str:
        """Return the domain that one more worker gets, or ""."""
        given = {"port": PORT, "run_dir": self._folder, "is_limited": False, **how}
        share = shared_device_memory(log=lambda event, **fields: self.told.append({event: fields}), **given)
        return "" if share is None else share.domain

    @property
    def reason(self) -> object:
        return self.told[-1]["device_memory"]["reason"]  # type: ignore[index]


def test_one_worker_probes_and_all_get_the_same_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, found = Node(tmp_path, monkeypatch), []
    workers = [threading.Thread(target=lambda: found.append(node.decide())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert node.probes == [(f"{__name__}:Fake", 0)] and len(found) == 4 and len({*found}) == 1 and found[0]
    assert node.decide() == found[0]
    assert node.told[-1]["device_memory"]["read_in_place"] is True  # type: ignore[index]


def test_a_failed_probe_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, monkeypatch)
    node.found = ReadableDevices(reason="the reader has lost its context")
    assert [node.decide(), node.decide()] == ["", ""] and len(node.probes) == 1
    assert node.reason == "the reader has lost its context"
    assert capsys.readouterr().err.count("copied through host memory") == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"readable": ["x"], "reason": ""}'])
def test_a_result_that_is_not_whole_counts_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    node = Node(tmp_path, monkeypatch)
    assert node.decide()
    (file,) = tmp_path.glob("device-memory-*.json")
    file.write_text(text)
    assert node.decide() == "" and len(node.probes) == 1
    assert "was killed while it wrote" in str(node.reason)


def test_what_needs_no_probe_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch)
    assert node.decide(port=HOST) == node.decide(run_dir=None) == "" and node.told == []
    assert node.decide(is_limited=True) == "" and node.reason == "the device has a memory limit"
    refusing = Node(tmp_path, monkeypatch, "Refusing")
    assert refusing.decide() == "" and refusing.reason == "it has no virtual memory"
    monkeypatch.delitem(PROVIDERS, KIND)
    assert node.decide() == "" and node.reason == "no memory of meta devices is shared between processes"
    assert node.probes == refusing.probes == []
