"""Test part 3: prices. Step times against a plain loop and DDP, members that share a device, copies, memory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch

from experiments.accelerator import commands
from experiments.accelerator.commands import EndedError
from experiments.accelerator.jobs import Job, Ran
from experiments.accelerator.models import CONFIGS, WARM, Training
from experiments.train_gpt.model import GPT, parameter_count
from tests.gpu.parts import Setting, tells

MODELS = ("124m", "1b")
TOKENS = {"2k": 2048, "8k": 8192, "32k": 32768}
SMALL = {"2k": 32, "8k": 64, "32k": 128}
"""Tokens of a rehearsal."""
RATES_S = 40.0
Found = dict[str, Any]


def training(setting: Setting, model: str, tokens: str, micro_tokens: str, **fields: Any) -> Training:
    """Return a plain loop that is timed. Tokens are those of one member and step."""
    name, numbers = ("rehearsal", SMALL) if setting.small else (model, TOKENS)
    context = CONFIGS[name].context
    size = max(1, numbers[micro_tokens] // context)
    count = max(1, numbers[tokens] // (size * context))
    settings: Found = {"device": setting.device, "timed": True, "deterministic": False, "steps": 0, "plain": True}
    settings |= {"seconds": 0.1 if setting.small else 1.5, "micro_batch_size": size, "run_length": count, **fields}
    members = settings.get("members", 1)
    return Training(model=f"{name} bf16", micro_batches=count * members, **settings)


def member(plain: Training, members: int = 1, **fields: Any) -> Training:
    """Return the training of members of a job that have the work of the plain loop each."""
    count = plain.micro_batches * members
    return replace(plain, plain=False, members=members, micro_batches=count, beside=1, **fields)


def timed(setting: Setting, name: str, first: Training, *then: Training) -> list[Found]:
    """Run trainings one after the other in the same processes. Returns the lines of all processes."""
    return lines(setting.run(name, Job(training=first, then=then)))


def lines(ran: Ran) -> list[Found]:
    """Return what the processes of a job have measured."""
    paths = sorted((ran.folder / "times").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def mean(found: list[Found], key: str) -> float:
    """Return the mean of a figure over processes."""
    return float(sum(each[key] for each in found) / len(found))


@tells("copy_rate", "pinned_gain")
def rates(setting: Setting) -> None:
    """Measure copies of large tensors alone."""
    found = rates_of(setting)
    for way in ("out", "in"):
        shared, pinned, unpinned = (found[f"{kind} {way}"] for kind in ("shared", "pinned", "unpinned"))
        note = f"shared {shared / 1e9:.1f}, pinned {pinned / 1e9:.1f}, unpinned {unpinned / 1e9:.1f} GB/s"
        setting.tell("copy_rate", shared / pinned, way, note)
        setting.tell("pinned_gain", shared / unpinned, way, note)


def rates_of(setting: Setting) -> dict[str, float]:
    """Return the rates of copies, which are measured once."""
    path = setting.folder / "rates.txt"
    if not path.exists():
        command = ["-m", "tests.gpu.copies", "--device", setting.device, *(["--megabytes", "1"] * setting.small)]
        commands.run("rates", command, path, deadline_s=setting.limited(RATES_S))
    found: dict[str, float] = json.loads(path.read_text().splitlines()[-1])
    return found


@tells("time_ratio", "ddp_ratio", "peak_ratio", "host_bytes", "deterministic_price")
def step_times(setting: Setting) -> None:
    """Measure plain loop, DDP, a job of one and the plain loop again in one process, for each model and setting."""
    plain_s: dict[tuple[str, str, str], float] = {}
    for model, kind in product(MODELS, ("free", "deterministic")):
        found = []
        try:
            for tokens in ("8k", "32k"):
                first = training(setting, model, tokens, "8k", deterministic=kind == "deterministic")
                as_long = replace(first, seconds=0.0)
                found.append((first, replace(as_long, ddp=True), member(as_long), as_long))
            measured = timed(setting, f"steps-{model}-{kind}", *chain(*found))
        except EndedError as error:
            for tokens, key in product(("8k", "32k"), ("time_ratio", "ddp_ratio")):
                setting.tell(key, None, f"{model}, {tokens}, {kind}", str(error))
            continue
        for tokens, (before, ddp, one, after) in zip(("8k", "32k"), (measured[:4], measured[4:]), strict=True):
            case = f"{model}, {tokens}, {kind}"
            plain_s[model, tokens, kind] = step_s = mean([before, after], "step_s")
            note = f"plain {before['step_s']:.4f} and {after['step_s']:.4f}, DDP {ddp['step_s']:.4f}, member "
            note += f"{one['step_s']:.4f} s; {one['steps']} steps"
            setting.tell("time_ratio", one["step_s"] / step_s, case, note)
            setting.tell("ddp_ratio", one["step_s"] / ddp["step_s"], case, note)
            if tokens == "32k" and kind == "free":
                peaks = f"{one['peak_bytes'] / 1e9:.3f} and {before['peak_bytes'] / 1e9:.3f} GB"
                setting.tell("peak_ratio", one["peak_bytes"] / max(1, before["peak_bytes"]), model, peaks)
                setting.tell("host_bytes", one["host_bytes"], model)
    for model, tokens in product(MODELS, ("8k", "32k")):
        pair = [plain_s.get((model, tokens, kind)) for kind in ("deterministic", "free")]
        if pair[0] and pair[1]:
            setting.tell("deterministic_price", pair[0] / pair[1], f"{model}, {tokens}")


@tells("sharing_ratio")
def sharing(setting: Setting) -> None:
    """Let 2 and 4 members share the device, and as many plain processes."""
    for count in (2, 4):
        try:
            value, note = sharing_ratio(setting, count)
        except EndedError as error:
            value, note = None, str(error)
        setting.tell("sharing_ratio", value, f"{count} members", note)


def sharing_ratio(setting: Setting, count: int) -> tuple[float, str]:
    """Return the throughput of members over that of plain processes, and a note."""
    one = training(setting, "124m", "32k", "8k", beside=count)
    calls = [partial(timed, setting, f"plain{count}/{number}", one) for number in range(count)]
    plain = list(chain(*setting.together(*calls, beside=count)))
    steps = WARM + max(each["steps"] for each in plain)
    members = timed(setting, f"sharing{count}", member(one, count, steps=steps))
    plain_s, member_s = mean(plain, "step_s"), mean(members, "step_s")
    return plain_s / member_s, f"plain {plain_s:.4f}, member {member_s:.4f} s"


@tells("carried_share", "carried_share_calculated", "hidden")
def carrying(setting: Setting) -> None:
    """Follow the copies of two members, and calculate what they would take."""
    rate = rates_of(setting)
    plain = {tokens: training(setting, "124m", tokens, "2k") for tokens in TOKENS}
    for tokens, compute in zip(TOKENS, timed(setting, "compute", *plain.values()), strict=True):
        two = member(plain[tokens], 2, steps=WARM + compute["steps"], copies=True, backups=0)
        try:
            found = timed(setting, f"carrying-{tokens}", two)
        except EndedError as error:
            setting.tell("carried_share", None, tokens, str(error))
            continue
        step_s, copies_s, exposed_s = (mean(found, key) for key in ("step_s", "copies_s", "exposed_s"))
        note = f"step {step_s:.4f}, copies {copies_s:.4f}, of them exposed {exposed_s:.4f} s; "
        note += f"{mean(found, 'copied_bytes') / 1e6:.0f} MB per step"
        setting.tell("carried_share", exposed_s / step_s, tokens, note)
        setting.tell("hidden", 1 - exposed_s / copies_s if copies_s else None, tokens, note)
        compute |= {"parameters": parameters_of(two), "micro_batches": plain[tokens].micro_batches}
        share = calculated_share(compute, rate, members=2)
        setting.tell("carried_share_calculated", share, tokens, f"plain step {compute['step_s']:.4f} s")


def parameters_of(training: Training) -> int:
    """Return the number of parameters of a model."""
    assert training.setup.config is not None
    with torch.device("meta"):
        return parameter_count(GPT(training.setup.config))


def calculated_share(compute: Found, rate: dict[str, float], *, members: int) -> float:
    """Return the share of a step that copies take which nothing hides.

    N parameters: partials are copied out (4 bytes each) during the last micro-batch's backward as far as it lasts, and
    those of the others for the own shard in; published bfloat16 parameters of the own shard are copied out, and those
    of the others in. The members share the bus and the device.
    """
    number, count = compute["parameters"], compute["micro_batches"]
    others = (members - 1) / members
    out_s, in_s = members / rate["shared out"], members / rate["shared in"]
    backward_s = members * compute["step_s"] / count * 2 / 3
    exposed_s = max(0.0, 4 * number * out_s - backward_s)
    exposed_s += 4 * number * others * in_s + 2 * number / members * out_s + 2 * number * others * in_s
    return exposed_s / (exposed_s + members * compute["step_s"])
