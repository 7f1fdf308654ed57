"""For how long steps have waited for a checkpoint."""

from __future__ import annotations

from unittest.mock import patch

from elastrain.runtime.durable import checkpoint_parts
from elastrain.runtime.durable.checkpoint_parts import Blocked


def test_only_what_somebody_waited_for_counts_and_it_is_told_once() -> None:
    blocked = Blocked()
    with patch.object(checkpoint_parts.time, "monotonic", side_effect=[10.0, 10.5, 20.0, 20.25]):
        blocked.end()  # of a state that was copied behind the scenes
        for _ in range(2):
            blocked.begin()
            blocked.end()
    assert blocked.take() == 0.75
    assert blocked.take() == 0.0
