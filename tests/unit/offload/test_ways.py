"""The way of a device's bytes to a directory: by KvikIO where it is faster, found once per node, and told."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from elastrain.device.same_memory import HOST
from elastrain.offload.drives import gds, ways
from elastrain.offload.drives.port import HOST_IO, OWN_COPIES
from elastrain.offload.drives.ways import DriveWay, faster, together, way_to

GPUDIRECT, COMPATIBLE, _ = gds.WAYS
FAST = gds.Probed(moved_by=GPUDIRECT, seconds=0.5, own_seconds=1.0)
SLOW = gds.Probed(moved_by=COMPATIBLE, seconds=2.0, own_seconds=1.0)


@dataclass
class Port:
    """The part of a device's port that the choice of a way uses."""

    device: torch.device
    is_host: bool = False


CUDA: Any = Port(torch.device("cuda", 0))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let each directory's probe find KvikIO fast, and return the directories that were probed."""
    seen: list[str] = []

    def probe(directory: str) -> gds.Probed:
        seen.append(directory)
        return FAST

    monkeypatch.setattr(gds, "probe", probe)
    monkeypatch.setattr(torch.version, "hip", None)
    return seen


def test_kvikio_is_taken_where_it_is_faster_and_each_choice_has_its_reason() -> None:
    assert faster(FAST) == DriveWay(
        moved_by=GPUDIRECT, reason="the probe took 0.500 s by GPUDirect, and 1.000 s by our own pinned copies"
    )
    assert faster(SLOW).moved_by == OWN_COPIES and "2.000 s by cuFile's compatibility mode" in faster(SLOW).reason
    assert faster(gds.Probed(why_not="it is missing")) == DriveWay(moved_by=OWN_COPIES, reason="it is missing")


def test_only_cuda_is_probed(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert way_to("/ssd", HOST).moved_by == HOST_IO
    other: Any = Port(torch.device("xpu", 0))
    assert way_to("/ssd", other) == DriveWay(
        moved_by=OWN_COPIES, reason="KvikIO is for CUDA only, and this device is xpu:0"
    )
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert way_to("/ssd", CUDA).moved_by == OWN_COPIES
    assert probes == []


def test_the_workers_of_a_node_probe_a_directory_once(probes: list[str], tmp_path: Path) -> None:
    found = [way_to(directory, CUDA, tmp_path) for directory in ("/one", "/one", "/two", "/two")]
    assert {each.moved_by for each in found} == {GPUDIRECT}
    assert probes == ["/one", "/two"]
    for file in (tmp_path / "offload").glob("*.way"):
        file.write_text('{"moved_by": "GPU')  # as a worker leaves it that was killed while it wrote
    assert way_to("/one", CUDA, tmp_path).moved_by == way_to("/one", CUDA, tmp_path).moved_by == GPUDIRECT
    assert probes == ["/one", "/two", "/one"]
    assert way_to("/one", CUDA).moved_by == GPUDIRECT and len(probes) == 4


def test_one_process_uses_kvikio_in_one_way() -> None:
    way = {each: DriveWay(moved_by=each, reason="") for each in (GPUDIRECT, COMPATIBLE, OWN_COPIES)}
    used = together({"/a": way[OWN_COPIES], "/b": way[COMPATIBLE], "/c": way[GPUDIRECT], "/d": way[COMPATIBLE]})
    assert [each.moved_by for each in used.values()] == [OWN_COPIES, COMPATIBLE, OWN_COPIES, COMPATIBLE]
    assert used["/c"].reason.startswith("KvikIO moves the bytes to another directory by cuFile's compatibility mode")


def test_the_command_tells_the_way_to_each_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], probes: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ways", "/one", "/two"])
    monkeypatch.setattr(ways, "current_device", lambda: CUDA)
    ways.main()
    told = json.loads(capsys.readouterr().out)
    assert {directory: each["moved_by"] for directory, each in told.items()} == {"/one": GPUDIRECT, "/two": GPUDIRECT}
