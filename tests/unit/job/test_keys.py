"""Keys of random streams: the same everywhere and for ever, different for different purposes."""

from __future__ import annotations

from elastrain.job.batch import block_key, collate_key, sample_key


def test_keys_are_fixed_for_ever() -> None:
    assert block_key(0, 0, 0, "") == block_key(0, 0, 0, "", 0, aside=False) == 5765269222852792640
    assert block_key(0, 0, 0, "a", 1) == 4683895271019776175
    assert sample_key(0, 0, 0) == 7164415568194269660
    assert collate_key(0, 0, 0) == 2614020160113226016


def test_every_argument_changes_the_key() -> None:
    blocks = [
        block_key(0, 0, 0, ""),
        block_key(1, 0, 0, ""),
        block_key(0, 1, 0, ""),
        block_key(0, 0, 1, ""),
        block_key(0, 0, 0, "a"),
        block_key(0, 0, 0, "a", 1),
        block_key(0, 0, 0, "a", 2),
        block_key(0, 0, 0, "a", aside=True),
        block_key(0, 0, 0, "a", 1, aside=True),
    ]
    samples = [sample_key(0, 0, 0), sample_key(1, 0, 0), sample_key(0, 1, 0), sample_key(0, 0, 1)]
    collates = [collate_key(0, 0, 0), collate_key(1, 0, 0), collate_key(0, 1, 0), collate_key(0, 0, 1)]
    assert len({*blocks, *samples, *collates}) == 17


def test_keys_fit_into_63_bits_for_any_seed() -> None:
    for seed in (-1, 0, 2**63, 2**64 - 1, -(2**63), 12345678901234567890123):
        for key in (block_key(seed, 10**12, 10**6, "x"), sample_key(seed, 3, 10**12), collate_key(seed, 3, 4)):
            assert 0 <= key < 2**63
