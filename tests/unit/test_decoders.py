"""Whatever bytes come from outside, a decoder returns a value or raises its stated error, soon and in little memory.

python -m pytest -m on_demand tests/unit/test_decoders.py       a million, 20,000 in the usual run
"""

from __future__ import annotations

import resource
import time
from itertools import islice

import pytest

from tests.support.decoders import Decoder, decoders, mutations

SECONDS_MOST = 2.0  # of this thread's own processor time, for one input of a few kilobytes
GROWTH_MOST_KB = 64 << 10


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    return {each.name: each for each in decoders(tmp_path_factory.mktemp("decoders"))}


def _feed(decoder: Decoder, count: int, seed: int) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, data in enumerate(islice(mutations(decoder.samples, seed), count)):
        began_s = time.thread_time()
        try:
            decoder.decode(decoder.repair(data))
        except decoder.errors:
            pass
        except Exception as error:
            raise AssertionError(f"{decoder.name}, seed {seed}, input {number} {data[:300]!r}") from error
        assert time.thread_time() - began_s < SECONDS_MOST, f"{decoder.name}, seed {seed}, input {number} takes long"
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < GROWTH_MOST_KB, f"{decoder.name} has taken {grown_kb} KiB for {count} inputs"


def test_what_is_valid_is_read(table: dict[str, Decoder]) -> None:
    for decoder in table.values():
        for sample in decoder.samples:
            if "greeting" not in decoder.name and "control" not in decoder.name:
                decoder.decode(sample)


def test_20_000_damaged_inputs_over_all_decoders(table: dict[str, Decoder]) -> None:
    for decoder in table.values():
        _feed(decoder, 20_000 // len(table), seed=1)


@pytest.mark.on_demand
@pytest.mark.timeout(1800)
def test_a_million_damaged_inputs_over_all_decoders(table: dict[str, Decoder]) -> None:
    for decoder in table.values():
        _feed(decoder, 1_000_000 // len(table) + 1, seed=2)
