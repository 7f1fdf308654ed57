"""The runner of `make test-gpu`, without a device: wheels, time limits, lines, and the generated pages."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from experiments.accelerator import commands
from experiments.accelerator.commands import EndedError
from experiments.accelerator.jobs import Ran
from tests.gpu import parts, run, shown, wheels
from tests.gpu.claims import CLAIMS, PARTS
from tests.gpu.copies import length
from tests.gpu.part3 import calculated_share
from tests.gpu.parts import Setting, cases_of, run_part, tells
from tests.gpu.wheels import Requirement

MINOR = sys.version_info.minor


def a_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def line(key: str, value: object, case: str = "", **more: object) -> dict[str, object]:
    versions = {"torch": "2.11.0"}
    found = {"part": CLAIMS[key].part, "key": key, "case": case, "value": value, "note": "", "device": "A GPU"}
    return {**found, "driver": "1", "versions": versions, "commit": "c", "date": "2026-12-01T00:00:00", **more}


def a_setting(folder: Path, told: list[tuple[object, ...]], *, left_s: float = 60.0) -> Setting:
    return Setting(
        device="cuda",
        folder=folder,
        until_s=time.monotonic() + left_s,
        tell_line=lambda *line: told.append(line),
    )


# ------------------------------------------------------------------------------------------------------------- wheels


@pytest.mark.parametrize(
    ("wheel", "expected"),
    [
        ("zstandard-1-py3-none-any.whl", True),
        ("zstandard-1-py2.py3-none-any.whl", True),
        (f"zstandard-1-cp3{MINOR}-cp3{MINOR}-manylinux_2_17_{platform.machine()}.manylinux2014.whl", True),
        (f"cryptography-1-cp37-abi3-manylinux_2_28_{platform.machine()}.whl", True),
        (f"zstandard-1-cp3{MINOR + 1}-cp3{MINOR + 1}-manylinux_2_17_{platform.machine()}.whl", False),
        (f"zstandard-1-cp3{MINOR}-cp3{MINOR}-musllinux_1_2_{platform.machine()}.whl", False),
        (f"zstandard-1-cp3{MINOR}-cp3{MINOR}-manylinux_2_17_sparc.whl", False),
    ],
)
def test_a_wheel_fits_this_interpreter_or_does_not(wheel: str, expected: bool) -> None:
    assert wheels.fits(wheel) is expected


def test_only_what_the_interpreter_lacks_is_unpacked_and_never_torch(tmp_path: Path) -> None:
    brought, into = tmp_path / "brought", tmp_path / "into"
    a_wheel(brought, "torch-9-py3-none-any.whl", {"torch/__init__.py": ""})
    a_wheel(brought, "nvidia_thing-9-py3-none-any.whl", {"nvidia/thing.py": ""})
    a_wheel(brought, "numpy-9-py3-none-any.whl", {"numpy/__init__.py": ""})
    files = {
        "plain_thing/__init__.py": "x = 1",
        "plain_thing-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: plain-thing\nVersion: 1.2\n",
        "plain_thing-1.data/scripts/thing": "#!/bin/sh\n",
        "plain_thing-1.data/platlib/other.py": "y = 2",
    }
    a_wheel(brought, "plain_thing-1-py3-none-any.whl", files)
    assert wheels.unpack(brought, into) == ["plain-thing"]
    assert os.access(into / "bin/thing", os.X_OK)
    assert (into / "other.py").read_text() == "y = 2"
    assert not (into / "torch").exists()
    assert not (into / "numpy").exists()
    assert wheels.lacking([Requirement("plain-thing", "1.2")], [str(into)]) == []
    assert wheels.lacking([Requirement("plain-thing", "1.10")], [str(into)]) != []


def test_one_sentence_says_what_is_missing_and_what_for() -> None:
    missing = wheels.lacking(wheels.requirements(), [])
    said = wheels.sentence(missing)
    for name in ("msgspec>=0.19", "zstandard>=0.22", "etcd-sdk-python", "kvikio-cu13", "WHEELS="):
        assert name in said
    assert said.count(".") == said.count(".", 0, -1) + 1
    assert said.endswith(".")
    assert wheels.sentence([]) == "Nothing is missing."


# -------------------------------------------------------------------------------------------------------------- parts


def test_every_case_of_every_claim_is_told_by_one_function_of_its_part() -> None:
    wanted = {part: Counter() for part in PARTS}
    for claim in CLAIMS.values():
        if claim.part is not None:
            wanted[claim.part].update((claim.key, case) for case in claim.cases)
    told = {part: Counter(pair for case in cases_of(part) for pair in case.tells) for part in PARTS}  # type: ignore[attr-defined]
    assert told == wanted


def test_what_keeps_a_case_from_its_end_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @tells("members_equal")
    def hangs(setting: Setting) -> None:
        setting.tell("members_equal", True, "2 members")
        commands.run("endless", ["-c", "import time; time.sleep(60)"], tmp_path / "output.txt", deadline_s=0.5)

    @tells("runs_equal")
    def misspelt(setting: Setting) -> None:
        raise AttributeError("no such name")

    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(parts, "cases_of", lambda part: [hangs, misspelt])
    run_part(1, a_setting(tmp_path, told))
    assert told[0] == ("members_equal", "2 members", True, "", False)
    assert told[1][:3] == ("members_equal", "4 members", None)
    assert "not done within" in str(told[1][3])
    assert told[2][:3] == ("runs_equal", "", None)
    assert "no such name" in str(told[2][3])
    assert [each[4] for each in told] == [False, False, False]


def test_what_the_time_does_not_allow_or_nobody_asked_for_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    @tells("runs_equal")
    def quick(setting: Setting) -> None:
        ran.append(1)

    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(parts, "cases_of", lambda part: [quick])
    run_part(1, a_setting(tmp_path, told, left_s=1.0))
    assert [each[4] for each in told] == [True]
    run_part(1, a_setting(tmp_path, told), keys=["members_equal"])
    assert len(told) == 1
    assert not ran


def test_a_job_of_one_that_fails_fails_once_for_all_that_compare_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, tries = a_setting(tmp_path, []), []

    def fail(*_: object) -> Ran:
        tries.append(1)
        raise EndedError("alone was killed")

    monkeypatch.setattr(setting, "run", fail)
    for members in (2, 4):
        with pytest.raises(EndedError, match="was killed"):
            setting.alone(setting.training(members=members))
    assert len(tries) == 1


def test_jobs_of_one_that_differ_in_anything_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, names = a_setting(tmp_path, []), list[str]()
    monkeypatch.setattr(setting, "run", lambda name, job: names.append(name))
    for compiled in ("", "eager", "model aot_eager"):
        for members in (1, 2):
            setting.alone(setting.training(members=members, compiled=compiled))
    assert len(names) == len(set(names)) == 3


# -------------------------------------------------------------------------------------------------- lines and the pages


def test_the_generated_pages_are_those_of_the_table_and_the_lines() -> None:
    for path, text in shown.pages().items():
        assert path.read_text() == text, "run `python -m tests.gpu.shown`"


def test_a_claim_is_shown_once_the_newest_line_of_each_case_reaches_its_bound() -> None:
    claim = CLAIMS["sharing_ratio"]
    lines = [line("sharing_ratio", 0.9, "2 members"), line("sharing_ratio", 0.8, "4 members")]
    assert not shown.is_shown(claim, shown.newest(lines))
    lines.append(line("sharing_ratio", 0.86, "4 members"))
    assert shown.is_shown(claim, shown.newest(lines))
    lines.append(line("sharing_ratio", None, "4 members", not_run=True))
    assert shown.is_shown(claim, shown.newest(lines))
    assert "*shown*: A GPU, 2026-12-01" in shown.section(lines)
    lines.append(line("sharing_ratio", None, "4 members", note="was killed"))
    assert not shown.is_shown(claim, shown.newest(lines))
    assert "4 members: none (was killed)" in shown.tables(lines)


def test_values_reach_bounds() -> None:
    assert CLAIMS["runs_equal"].reached(True)
    assert not CLAIMS["runs_equal"].reached(1)
    assert CLAIMS["time_ratio"].reached(1.05)
    assert not CLAIMS["time_ratio"].reached(1.06)
    assert CLAIMS["join_s"].reached(9.0)
    assert not CLAIMS["join_s"].reached(None)


def test_what_a_rehearsal_has_told_shows_nothing() -> None:
    assert not shown.is_shown(CLAIMS["runs_equal"], shown.newest([line("runs_equal", True, rehearsal=True)]))


def test_the_newest_run_of_each_step_under_the_lowest_torch_is_shown() -> None:
    lines = [
        line("runs_equal", False) | {"part": None, "key": "floor", "case": "test part 1", "commit": "old"},
        line("runs_equal", True) | {"part": None, "key": "floor", "case": "test part 1", "commit": "new"},
    ]
    text = shown.section(lines)
    assert "| test part 1 | passed: torch 2.11.0, 2026-12-01, new |" in text
    assert "old" not in text
    assert "no device has run them" in text


def test_a_line_has_every_field(tmp_path: Path) -> None:
    shown.append([line("runs_equal", True)], tmp_path / "lines")
    assert shown.read(tmp_path / "lines") == [line("runs_equal", True)]
    with pytest.raises(ValueError, match="driver"):
        shown.append([{"part": 1, "key": "runs_equal"}], tmp_path / "lines")


def test_lines_go_to_the_file_at_once_and_a_rehearsal_keeps_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"kind": "cuda", "name": "A GPU", "uuid": None, "driver": "1", "versions": {}}
    options = run.Options.read({"LINES": str(tmp_path / "lines"), "COMMIT": "c"})
    telling = run.Telling(about, options)
    telling.line(3, "time_ratio", "124m, 8k, free", 1.2, "", False)
    assert telling.missed == 1
    assert "MISSED" in capsys.readouterr().out
    assert [each["value"] for each in shown.read(tmp_path / "lines")] == [1.2]
    rehearsed = run.Telling(about | {"kind": "late"}, run.Options.read({"COMMIT": "c"}))
    rehearsed.line(3, "time_ratio", "124m, 8k, free", 1.2, "", False)
    assert (rehearsed.path, rehearsed.missed) == (None, 0)
    assert "not measured" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- the command


def test_wrong_variables_are_refused_in_one_sentence() -> None:
    for given, said in (({"PART": "1 8"}, "got 8"), ({"KEYS": "x"}, "got x"), ({"WHEELS": "/nowhere"}, "/nowhere")):
        with pytest.raises(SystemExit, match=said):
            run.Options.read(given)


def command(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COMMIT": "c", **variables}
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.run"], cwd=wheels.ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_without_a_device_one_sentence_says_so() -> None:
    ended = command(CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout.splitlines()[1:] == [
        "There is no device that torch can use on this machine, so nothing was run."
    ]


def environment_of(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.mark.slow
def test_a_run_that_is_ended_leaves_no_process_and_no_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = {**os.environ, "COMMIT": "c", "DEVICE": "late", "PART": "1", "TMPDIR": str(tmp_path)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))  # which torch makes at import
    started = subprocess.Popen([sys.executable, "-m", "tests.gpu.run"], cwd=wheels.ROOT, env=environment)
    until_s, mine = time.monotonic() + 60, f"TMPDIR={tmp_path}".encode()
    while not list(tmp_path.glob("*/part1/*/run/output.log")) and time.monotonic() < until_s:
        time.sleep(0.1)
    started.terminate()
    assert started.wait(60) == 143
    # A warm server that is stopped while it forks notices it when its parent has gone.
    until_s = time.monotonic() + 20
    while left := [path for path in Path("/proc").glob("[0-9]*") if mine in environment_of(path)]:
        assert time.monotonic() < until_s, [(path / "cmdline").read_bytes()[:300] for path in left]
        time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_runs_on_the_test_device(tmp_path: Path) -> None:
    ended = command(DEVICE="late", PART="1", KEYS="runs_equal", LINES=str(tmp_path / "lines"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (told,) = [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()]
    assert (told["value"], told["rehearsal"], told["device"]) == (True, True, "Late Test Device")


# ------------------------------------------------------------------------------------------------------------- prices


def test_spans_are_counted_once() -> None:
    assert length([(0, 1), (0.5, 2), (3, 4), (3.2, 3.4)]) == 3.0
    assert length([]) == 0


def test_the_calculated_share_is_that_of_the_arithmetic() -> None:
    compute = {"parameters": 1e9, "micro_batches": 1, "step_s": 1.0}
    rate = {"shared out": 50e9, "shared in": 50e9}
    # Two members: 2 GB of partials and 1 GB of parameters each way, at half of the bus; 4 GB out hide behind 4/3 s.
    exposed_s = (2 + 1 + 1) / 25
    assert calculated_share(compute, rate, members=2) == pytest.approx(exposed_s / (exposed_s + 2))
    compute |= {"micro_batches": 1000}
    assert calculated_share(compute, rate, members=2) > exposed_s / (exposed_s + 2)
