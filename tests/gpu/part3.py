"""Test part 3: prices. Step times against a plain loop and DDP, members that share a device, copies, memory."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tests.gpu.parts import HERE, Setting, tells
from tests.gpu.processes import EndedError

MEASURE = str(HERE / "measure.py")
MODELS = ("124m", "1b")
TOKENS = {"2k": 2048, "8k": 8192, "32k": 32768}
SMALL = {"2k": 32, "8k": 64, "32k": 128}
"""Tokens of a rehearsal."""
Found = dict[str, Any]


def tokens_of(setting: Setting, name: str) -> int:
    """Return the tokens per member and step."""
    return (SMALL if setting.small else TOKENS)[name]


def arguments(setting: Setting, out: Path, model: str, kinds: str, tokens: str, micro: str, *more: str) -> list[str]:
    """Return the arguments of a process that measures; its results go to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    numbers = ",".join(str(tokens_of(setting, each)) for each in tokens.split())
    given = ["--device", setting.device, "--kinds", kinds, "--tokens", numbers, "--out", str(out), *more]
    given += ["--model", "small" if setting.small else model, "--micro-tokens", str(tokens_of(setting, micro))]
    return [MEASURE, *given, *(["--seconds", "0.1"] if setting.small else [])]


def results(out: Path) -> list[list[Found]]:
    """Return what each process has measured."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def alone(setting: Setting, name: str, *given: str, **variables: str) -> list[Found]:
    """Run one process that measures."""
    out = setting.folder / name / "out"
    setting.run(name, arguments(setting, out, *given), limit_s=75, **variables)
    return results(out)[0]


def side_by_side(setting: Setting, name: str, count: int, *given: str) -> list[Found]:
    """Run as many plain processes at the same time; return the one result of each."""
    out = setting.folder / name / "out"
    command = arguments(setting, out, *given, "--members", str(count))
    calls = [partial(setting.run, f"{name}-{number}", command, limit_s=75) for number in range(count)]
    for each in setting.together(*calls, beside=count):
        each.result()
    return [found[0] for found in results(out)]


def job(setting: Setting, name: str, count: int, *given: str) -> list[Found]:
    """Run a job of several members that measure; return the one result of each."""
    folder = setting.folder / name
    command = arguments(setting, folder / "out", *given, "--members", str(count))
    launched = ["-m", "elastrain.launcher", "run", "--nproc-per-node", str(count), "--run-dir", str(folder / "run")]
    setting.run(name, [*launched, *command], limit_s=75)
    return [found[-1] for found in results(folder / "out")]


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
    path = setting.folder / "rates" / "output.txt"
    if not path.exists():
        size = ["--megabytes", "1"] if setting.small else []
        setting.run("rates", ["-m", "tests.gpu.copies", "--device", setting.device, *size], limit_s=40)
    found: dict[str, float] = json.loads(path.read_text().splitlines()[-1])
    return found


@tells("time_ratio", "ddp_ratio", "peak_ratio", "host_bytes", "deterministic_price")
def step_times(setting: Setting) -> None:
    """Measure plain loop, DDP, a job of one and the plain loop again in one process, for each model and setting."""
    plain_s: dict[tuple[str, str, str], float] = {}
    for model, kind in product(MODELS, ("free", "deterministic")):
        more = ["--deterministic"] if kind == "deterministic" else []
        variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if more else {}
        try:
            found = alone(
                setting, f"steps-{model}-{kind}", model, "plain,ddp,job,plain", "8k 32k", "8k", *more, **variables
            )
        except EndedError as error:
            for tokens, key in product(("8k", "32k"), ("time_ratio", "ddp_ratio")):
                setting.tell(key, None, f"{model}, {tokens}, {kind}", str(error))
            continue
        for tokens, (before, ddp, member, after) in zip(("8k", "32k"), (found[:4], found[4:]), strict=True):
            case = f"{model}, {tokens}, {kind}"
            plain_s[model, tokens, kind] = step_s = mean([before, after], "step_s")
            note = f"plain {before['step_s']:.4f} and {after['step_s']:.4f}, DDP {ddp['step_s']:.4f}, member "
            note += f"{member['step_s']:.4f} s; {member['steps']} steps"
            setting.tell("time_ratio", member["step_s"] / step_s, case, note)
            setting.tell("ddp_ratio", member["step_s"] / ddp["step_s"], case, note)
            if tokens == "32k" and kind == "free":
                peaks = f"{member['peak_bytes'] / 1e9:.3f} and {before['peak_bytes'] / 1e9:.3f} GB"
                setting.tell("peak_ratio", member["peak_bytes"] / max(1, before["peak_bytes"]), model, peaks)
                setting.tell("host_bytes", member["host_bytes"], model)
    for model, tokens in product(MODELS, ("8k", "32k")):
        pair = [plain_s.get((model, tokens, kind)) for kind in ("deterministic", "free")]
        if pair[0] and pair[1]:
            setting.tell("deterministic_price", pair[0] / pair[1], f"{model}, {tokens}")


@tells("sharing_ratio")
def sharing(setting: Setting) -> None:
    """Let 2 and 4 members share the device, and as many plain processes."""
    for count in (2, 4):
        setting.compare("sharing_ratio", f"{count} members", partial(sharing_ratio, setting, count))


def sharing_ratio(setting: Setting, count: int) -> tuple[object, str]:
    """Return the throughput of members over that of plain processes, and a note."""
    plain = side_by_side(setting, f"plain{count}", count, "124m", "plain", "32k", "8k")
    steps = str(max(each["steps"] for each in plain))
    members = job(setting, f"sharing{count}", count, "124m", "job", "32k", "8k", "--steps", steps)
    plain_s, member_s = mean(plain, "step_s"), mean(members, "step_s")
    return plain_s / member_s, f"plain {plain_s:.4f}, member {member_s:.4f} s"


@tells("carried_share", "carried_share_calculated", "hidden")
def carrying(setting: Setting) -> None:
    """Follow the copies of two members, and calculate what they would take."""
    rate = rates_of(setting)
    plain = alone(setting, "compute", "124m", "plain", " ".join(TOKENS), "2k")
    for tokens, compute in zip(TOKENS, plain, strict=True):
        more = ["--steps", str(compute["steps"]), "--copies", "--backups", "0"]
        try:
            found = job(setting, f"carrying-{tokens}", 2, "124m", "job", tokens, "2k", *more)
        except EndedError as error:
            setting.tell("carried_share", None, tokens, str(error))
            continue
        step_s, copies_s, exposed_s = (mean(found, key) for key in ("step_s", "copies_s", "exposed_s"))
        note = f"step {step_s:.4f}, copies {copies_s:.4f}, of them exposed {exposed_s:.4f} s; "
        note += f"{mean(found, 'copied_bytes') / 1e6:.0f} MB per step"
        setting.tell("carried_share", exposed_s / step_s, tokens, note)
        setting.tell("hidden", 1 - exposed_s / copies_s if copies_s else None, tokens, note)
        share = calculated_share(compute, rate, members=2)
        setting.tell("carried_share_calculated", share, tokens, f"plain step {compute['step_s']:.4f} s")


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
