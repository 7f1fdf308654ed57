"""GPUDirect Storage: refused with a reason where it cannot work, bit-equal where it does."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from elastrain.offload import OffloadConfigError, save_on_disk
from elastrain.offload.drives import gds
from elastrain.offload.drives.port import OWN_COPIES
from elastrain.offload.drives.posix import PosixEngine

HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device: KvikIO moves CUDA tensors only")


@pytest.fixture
def with_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a module of KvikIO's name be found."""
    (tmp_path / "kvikio.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device here")
@pytest.mark.usefixtures("with_module")
def test_without_a_device_it_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (drive := tmp_path / "drive").mkdir()
    assert gds.probe(drive).why_not == "this process sees no CUDA device, and KvikIO moves CUDA tensors only"
    with pytest.raises(OffloadConfigError, match=r"GPUDirect Storage cannot be used in .*no CUDA device"):
        gds.open_engine(drive)
    with pytest.raises(OffloadConfigError, match="no CUDA device"):
        save_on_disk([drive], gds=True).__enter__()
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "gds-cu13"), ("12.8", "gds"), (None, "gds-cu13")])
def test_a_missing_wheel_is_named_with_the_extra_of_torchs_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, extra: str
) -> None:
    if importlib.util.find_spec("kvikio") is not None:
        pytest.skip("KvikIO is installed here")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(OffloadConfigError, match=rf"not installed: pip install 'elastrain\[{extra}\]'; without gds"):
        save_on_disk([tmp_path], gds=True).__enter__()


@pytest.mark.parametrize(
    ("allowed", "way"),
    [
        (("OFF", "false"), "GPUDirect"),
        (("OFF", "true"), "cuFile's compatibility mode"),
        (("ON", None), "KvikIO's compatibility mode"),
        ((), ""),
    ],
)
@pytest.mark.usefixtures("with_module")
def test_the_way_is_the_first_that_works_while_all_later_ones_are_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, str | None], way: str
) -> None:
    def ran(command: Sequence[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        if (env["KVIKIO_COMPAT_MODE"], env.get("CUFILE_ALLOW_COMPAT_MODE")) == allowed:
            return subprocess.CompletedProcess(command, 0, '{"seconds": 0.5, "own_seconds": 1.0}', "")
        return subprocess.CompletedProcess(command, 1, "", "first\nRuntimeError: no such file handle")

    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUFILE_ALLOW_COMPAT_MODE", raising=False)
    found = gds.probe(tmp_path)
    assert found.moved_by == way
    assert found.why_not == (None if way else "KvikIO failed: RuntimeError: no such file handle")


def test_where_our_own_copies_are_faster_they_move_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = gds.Probed(moved_by="KvikIO's compatibility mode", seconds=2.0, own_seconds=1.0)
    monkeypatch.setattr(gds, "probe", lambda directory: probed)
    engine = gds.open_engine(tmp_path)
    assert isinstance(engine, PosixEngine)
    engine.close()


def with_kvikio(tmp_path: Path) -> gds.Probed:
    found = gds.probe(tmp_path)
    if found.why_not is not None:
        pytest.skip(found.why_not)
    return found


@pytest.mark.gpu
@needs_cuda
def test_a_gibibyte_comes_back_bit_equal(tmp_path: Path) -> None:
    engine = gds.GdsEngine(tmp_path, with_kvikio(tmp_path).moved_by)
    engine.reserve(1 << 30)
    there = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(there)
    engine.write_cuda(0, there)
    engine.read_cuda(0, back)
    assert torch.equal(there, back)
    engine.close()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("by_kvikio", [False, True], ids=["pinned", "gds"])
def test_gradients_on_a_gpu_keep_their_bits(tmp_path: Path, by_kvikio: bool) -> None:
    if by_kvikio:
        with_kvikio(tmp_path)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)], torch.nn.Tanh()).cuda()
    x = torch.randn(1024, 512, device="cuda")
    net(x).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    offload = save_on_disk([tmp_path], memory_limit=8 << 20, gds=by_kvikio)
    for _ in range(3):
        net.zero_grad()
        with offload:
            loss = net(x).square().mean()
        loss.backward()
        found = [p.grad for p in net.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.stats().spilled_bytes > 0
    assert {each.moved_by for each in offload.stats().devices} <= {OWN_COPIES, *gds.WAYS}
    offload.close()
