"""Which files are profiles of a step: those that say so, whatever is left of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.offload.planning import step_profile


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ('{"kind":"lifetimes","format":7}', True),
        ('{"kind":"lifetimes","format":1,"profile":{"limit_by', True),
        ('{"format": 1, "kind": "lifetimes"}', True),
        ('{"kind":"activations","format":1}', False),
        ('{"stats":{"limit_by', False),
        ("", False),
    ],
)
def test_a_profile_is_told_from_other_files_also_where_it_was_cut_short(
    text: str, is_one: bool, tmp_path: Path
) -> None:
    file = tmp_path / "step.json"
    assert not step_profile.is_one(file)
    file.write_text(text)
    assert step_profile.is_one(file) is is_one
