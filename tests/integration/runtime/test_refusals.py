"""A process that would compute other bits, or that is a stranger, is kept out with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import PRECISION, Run, run_job

pytestmark = pytest.mark.slow

ON_M1 = "if __import__('os').environ['ELASTRAIN_MEMBER'] == 'm1':\n        "
THREADS = "torch.set_num_threads(1)"


def _job_with_an_odd_m1(tmp_path: Path, old: str, new: str) -> Run:
    text = PRECISION.read_text()
    assert text.count(old) == 1
    odd = tmp_path / "odd.py"
    odd.write_text(text.replace(old, new))
    return run_job(tmp_path, workers=2, script=odd, arguments=("--steps", "4"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("torch.set_num_threads(2)", ("intra-op threads", "2", "1")),
        ("torch.__version__ = '2.99.0'", ("torch", "2.99.0")),
    ],
)
def test_a_member_that_would_compute_other_bits_is_refused_by_name(
    tmp_path: Path, change: str, words: tuple[str, ...]
) -> None:
    run = _job_with_an_odd_m1(tmp_path, THREADS, f"{THREADS}\n    {ON_M1}{change}")
    _assert_refused(run, *words)


def _assert_refused(run: Run, *words: str) -> None:
    assert run.exit_code != 0
    (sentence,) = {line for line in run.output.splitlines() if words[0] in line and words[1] in line}
    assert all(word in sentence for word in words)
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", ("is refused", "result of a fixed", "same kind of processor")),
        ("MKL_CBWR", "COMPATIBLE", ("is refused", "result of a fixed", "MKL_CBWR")),
        ("PYTHONHASHSEED", "5", ("is refused", "hash of a word", "PYTHONHASHSEED")),
    ],
)
def test_a_member_whose_environment_changes_what_it_computes_is_refused(
    tmp_path: Path, variable: str, value: str, words: tuple[str, ...]
) -> None:
    """As another kind of processor would be: the script of m1 starts itself again with the variable."""
    again = f"""import os, sys
if os.environ["ELASTRAIN_MEMBER"] == "m1" and os.environ.get({variable!r}) != {value!r}:
    os.execve(sys.executable, [sys.executable, *sys.argv], {{**os.environ, {variable!r}: {value!r}}})
import argparse
"""
    _assert_refused(_job_with_an_odd_m1(tmp_path, "import argparse\n", again), *words)


def test_a_thread_count_that_changes_in_the_loop_is_refused(tmp_path: Path) -> None:
    before = "            if step.number >= 10"
    assert before in PRECISION.read_text()
    text = PRECISION.read_text().replace(before, f"            torch.set_num_threads(1 + step.number)\n{before}")
    odd = tmp_path / "odd.py"
    odd.write_text(text)
    run = run_job(tmp_path, workers=2, script=odd, arguments=("--steps", "4"))
    assert run.exit_code == 1
    assert "began with 1 intra-op threads and this step begins with 2" in run.output


def test_where_bits_may_differ_another_thread_count_may_join(tmp_path: Path) -> None:
    text = f"{THREADS}\n    {ON_M1}torch.set_num_threads(2)\n    keep = elastrain.init\n"
    text += "    elastrain.init = lambda **settings: keep(deterministic=False, **settings)"
    run = _job_with_an_odd_m1(tmp_path, THREADS, text)
    assert run.exit_code == 0, run.output
    assert set(run.digests) == {"m0", "m1"}
    assert len(set(run.digests.values())) == 1, "members agree to the bit"


def test_a_worker_with_a_wrong_secret_is_turned_away(tmp_path: Path) -> None:
    guess = tmp_path / "guess"
    guess.write_bytes(b"a guess")
    change = f"{ON_M1}__import__('os').environ['ELASTRAIN_SECRET_FILE'] = {str(guess)!r}"
    run = _job_with_an_odd_m1(tmp_path, THREADS, f"{THREADS}\n    {change}")
    assert run.exit_code != 0
    assert "RefusedError" in run.output
    assert "hold different secrets for job" in run.output
