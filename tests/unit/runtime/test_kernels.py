"""The fixed kernels that are compared when a member joins: the same each time, and nobody's generator moves."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from elastrain.decisions.membership import spec_difference
from elastrain.runtime.model.kernels import kernel_digests
from tests.support.shared import once

CPU = torch.device("cpu")
PRINT = """
import json, torch
from elastrain.runtime.model.kernels import kernel_digests
torch.set_num_threads(1)
print(json.dumps(kernel_digests(torch.device("cpu"))))
"""


def _elsewhere(**variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRINT], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout


@functools.cache
def _elsewhere_once() -> str:
    folder = once("kernels elsewhere", lambda made: (made / "digests").write_text(_elsewhere()))
    return (folder / "digests").read_text()


@pytest.mark.slow
def test_they_come_out_alike_every_time_with_any_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert len({str(kernel_digests(CPU)) for _ in range(20)}) == 1
    finally:
        torch.set_num_threads(threads)


def test_no_generator_moves_and_no_mode_of_the_script_matters() -> None:
    before = random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())
    plain = kernel_digests(CPU)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert kernel_digests(CPU) == plain
    with torch.inference_mode():
        assert kernel_digests(CPU) == plain
    assert before == (random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state()))


@pytest.mark.slow
def test_another_process_of_this_machine_has_the_same() -> None:
    assert json.loads(_elsewhere_once()) == kernel_digests(CPU)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY"])
def test_a_library_told_to_use_an_older_processor_shows(variable: str) -> None:
    if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
        pytest.skip("this processor has nothing newer to leave out")
    value = "avx2" if variable == "ATEN_CPU_CAPABILITY" else "AVX2"
    assert _elsewhere_once() != _elsewhere(**{variable: value})


def test_the_refusal_names_the_kernel_and_what_to_do() -> None:
    sentence = spec_difference({"result of a fixed convolution": "ab"}, {"result of a fixed convolution": "cd"})
    assert sentence.startswith("its result of a fixed convolution is cd, the job's is ab: start every worker on the")
    assert "ONEDNN_MAX_CPU_ISA" in sentence


def test_another_hash_seed_is_refused_with_its_variable() -> None:
    sentence = spec_difference({"hash of a word": 1}, {"hash of a word": 2})
    assert sentence.endswith("start every worker with the same PYTHONHASHSEED, which decides the order of sets")
