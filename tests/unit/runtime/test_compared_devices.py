"""What members of a job on a device compare when they join, and what of the host they compare no more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastrain.base.resume import Resume, changes, refusal
from elastrain.decisions.membership import spec_difference
from elastrain.device import DeviceDescription
from elastrain.device.switches import NAMES
from elastrain.errors import ConfigError
from elastrain.job.scaling import UNSCALED
from elastrain.runtime import settings as under_test
from elastrain.runtime.loader.loader import DataLoader
from elastrain.runtime.model.partition import describe
from elastrain.runtime.settings import Settings

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
H100 = DeviceDescription(
    type="cuda",
    index=0,
    name="NVIDIA H100 80GB HBM3",
    uuid="8a4c",
    capability="9.0",
    multiprocessors=132,
    runtime="CUDA 13.0",
    cudnn="91002",
    triton="3.5.0",
    driver="580.65.06",
)
CHECKPOINT = Resume(place="/data", name="life-0001-step-0000000040", step=40)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine whose CPU and device tests can change."""
    found = SimpleNamespace(gpu=H100, cpu="EPYC")

    def device_of(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(is_host=device.type == "cpu", describe=lambda: found.gpu)

    monkeypatch.setattr(under_test, "device_of", device_of)
    monkeypatch.setattr(under_test, "kernel_digests", lambda device: {"softmax": f"on {device.type}"})
    monkeypatch.setattr(under_test, "_cpu_model", lambda: found.cpu)
    # `elastrain.init` sets both, for a compiler that is imported later or was imported before.
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    if compiler := sys.modules.get("torch._inductor.config"):
        with compiler.patch(deterministic=True):
            yield found
    else:
        yield found


def spec(device: torch.device = GPU, *, deterministic: bool = True) -> dict[str, Any]:
    settings = Settings(seed=0, run_length=1, backups=1, loss_scale=UNSCALED, deterministic=deterministic)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([0] * 4, global_batch_size=2, micro_batch_size=1)
    loader.bind(0)
    return settings.describe(describe(model, optimizer), loader, optimizer, None, device)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (
            "name",
            "NVIDIA A100-SXM4-80GB",
            "its device name is NVIDIA A100-SXM4-80GB, the job's is NVIDIA H100 80GB HBM3",
        ),
        ("capability", "8.0", "its device capability is 8.0, the job's is 9.0"),
        ("multiprocessors", 114, "its device multiprocessors is 114, the job's is 132"),
        ("partition", "1g.10gb", "its device partition is 1g.10gb, the job's is None"),
        ("runtime", "CUDA 12.8", "its device runtime is CUDA 12.8, the job's is CUDA 13.0"),
        ("cudnn", "90100", "its device cuDNN is 90100, the job's is 91002"),
        ("triton", None, "its device Triton is None, the job's is 3.5.0"),
    ],
)
def test_a_member_with_another_device_is_refused_with_both_values(
    machine: SimpleNamespace, field: str, value: Any, words: str
) -> None:
    job = spec()
    machine.gpu = replace(H100, **{field: value})
    sentence = spec_difference(job, spec())
    assert sentence.startswith(f"{words}: start every worker on the same kind of device")


def test_of_unlike_devices_the_name_is_told_first(machine: SimpleNamespace) -> None:
    job = spec()
    machine.gpu = replace(H100, name="NVIDIA L4", capability="8.9", multiprocessors=58, cudnn=None)
    assert spec_difference(job, spec()).startswith("its device name is NVIDIA L4, the job's is NVIDIA H100")


def test_the_driver_the_place_and_the_host_of_equal_devices_may_differ(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec()
    machine.gpu, machine.cpu = replace(H100, driver="575.1", uuid="ffff", index=3), "Xeon"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert spec() == job


def test_jobs_on_the_cpu_compare_its_model_and_threads(machine: SimpleNamespace) -> None:
    job = spec(CPU)
    machine.cpu = "Xeon"
    assert spec_difference(job, spec(CPU)).startswith("its CPU model is Xeon, the job's is EPYC: start every worker")
    assert {"intra-op threads", "CPU capability", "result of a fixed softmax"} <= set(job)
    assert not any("device " in name or "torch." in name for name in job)


@pytest.mark.parametrize(("job", "came"), [(GPU, CPU), (CPU, GPU)])
def test_a_member_without_the_jobs_device_is_told_so(job: torch.device, came: torch.device) -> None:
    sentence = spec_difference(spec(job), spec(came))
    assert sentence.startswith(f"its device is {came.type}, the job's is {job.type}: give every worker a device of")


def test_without_deterministic_gradients_only_what_decides_an_update_is_compared(machine: SimpleNamespace) -> None:
    job = spec(deterministic=False)
    machine.gpu = replace(H100, name="NVIDIA H200", multiprocessors=114, cudnn="9")
    assert spec(deterministic=False) == job
    machine.gpu = replace(H100, capability="8.0")
    assert spec_difference(job, spec(deterministic=False)).startswith("its device capability is 8.0, the job's is 9.0")


SWITCHES = [
    ("torch.backends.cuda.matmul.fp32_precision", torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    ("torch.backends.cudnn.conv.fp32_precision", torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    ("torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction", torch.backends.cuda.matmul, None, False),
    ("torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction", torch.backends.cuda.matmul, None, False),
    ("torch.backends.cudnn.enabled", torch.backends.cudnn, None, False),
    ("torch.backends.cudnn.deterministic", torch.backends.cudnn, None, True),
]


@pytest.mark.parametrize(("name", "owner", "attribute", "value"), SWITCHES, ids=[each[0] for each in SWITCHES])
def test_a_switch_that_differs_is_named_as_torch_names_it(
    name: str, owner: Any, attribute: str | None, value: object
) -> None:
    job, attribute = spec(), attribute or name.rpartition(".")[2]
    before = getattr(owner, attribute)
    try:
        setattr(owner, attribute, value)
        sentence = spec_difference(job, spec())
    finally:
        setattr(owner, attribute, before)
    assert sentence.startswith(f"its {name} is {value}, the job's is {before}: start every worker with the same {name}")


@pytest.mark.parametrize("kernels", ["flash", "mem_efficient", "math", "cudnn"])
def test_a_way_of_attention_that_is_off_is_named(kernels: str) -> None:
    job, enable = spec(), getattr(torch.backends.cuda, f"enable_{kernels}_sdp")
    enable(False)
    try:
        sentence = spec_difference(job, spec())
    finally:
        enable(True)
    assert sentence.startswith(f"its torch.backends.cuda.{kernels}_sdp_enabled is False, the job's is True")


def test_precisions_that_a_script_sets_by_older_and_newer_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    job, before = spec(), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert "tf32, the job's is none" in spec_difference(job, spec())
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_variable_that_the_devices_libraries_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    job = spec()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert spec_difference(job, spec()).startswith(
        "its variable CUBLAS_WORKSPACE_CONFIG is :16:8, the job's is (unset): start every worker with the same variable"
    )


def test_torch_has_every_switch() -> None:
    """A name that torch has changed would be compared no more, without a word."""
    found = spec()
    missing = [name for name in NAMES if found[f"torch.{name}"] == "None"]
    assert [name for name in missing if not name.endswith("_split_k")] == []  # these two are newer than the others


def test_kernels_that_cudnn_chooses_by_time_are_refused_where_bits_are_promised(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.raises(ConfigError, match=r"cudnn.benchmark is True, so cuDNN chooses kernels by the time.*set it"):
        spec()
    spec(deterministic=False)
    spec(CPU)
    machine.gpu = replace(H100, cudnn=None)  # the switch of a library that the device does not have
    spec()


def test_the_script_may_change_threads_in_its_loop_where_the_device_computes() -> None:
    settings = Settings(seed=0, run_length=1, backups=1, loss_scale=UNSCALED, deterministic=True)
    settings.check_threads(torch.get_num_threads() + 1, GPU)
    with pytest.raises(ConfigError, match="intra-op threads and this step begins with"):
        settings.check_threads(torch.get_num_threads() + 1, CPU)


# Resumes.


@pytest.mark.parametrize(("wrote", "resumes"), [(GPU, CPU), (CPU, GPU)])
def test_a_resume_on_another_kind_of_device_is_one_change_that_has_to_be_accepted(
    wrote: torch.device, resumes: torch.device
) -> None:
    from_checkpoint = replace(CHECKPOINT, spec=spec(wrote))
    assert refusal(from_checkpoint, spec(wrote)) == ""
    sentence = refusal(from_checkpoint, spec(resumes))
    assert sentence.startswith(f"its device is {resumes.type}, the checkpoint's is {wrote.type}: start the job as it")
    assert "--accept-changes" in sentence
    assert refusal(replace(from_checkpoint, accepts_changes=True), spec(resumes)) == ""


def test_a_resume_on_a_device_of_another_name_is_one_change_too(machine: SimpleNamespace) -> None:
    from_checkpoint = replace(CHECKPOINT, spec=spec())
    machine.gpu = replace(H100, name="NVIDIA H200", multiprocessors=1, uuid="f", driver="1")
    assert changes(from_checkpoint, spec()) == (
        "its device name is NVIDIA H200, the checkpoint's is NVIDIA H100 80GB HBM3",
    )


def test_a_resume_on_the_same_kind_of_device_is_no_change(machine: SimpleNamespace) -> None:
    from_checkpoint = replace(CHECKPOINT, spec=spec())
    machine.gpu, machine.cpu = replace(H100, uuid="ffff", index=1, driver="590.1"), "Xeon"
    assert refusal(from_checkpoint, spec()) == ""


def test_other_changes_are_told_beside_that_of_the_device() -> None:
    from_checkpoint = replace(CHECKPOINT, spec=spec(CPU) | {"seed": 9, "momentum of parameter group 0": 0.5})
    told = changes(from_checkpoint, spec() | {"momentum of parameter group 0": 0.9})
    assert [each.partition(" is ")[0] for each in told] == [
        "its device",
        "its momentum of parameter group 0",
        "its seed",
    ]
