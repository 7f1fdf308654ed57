"""The digests with which members have passed the end, by example."""

from __future__ import annotations

from typing import Any

from elastrain.launcher.core.shutdown import FinalDigests


def test_a_member_with_a_part_of_the_parameters_has_no_digest_to_differ_by() -> None:
    cluster: Any = None  # nobody is waited for here
    digests = FinalDigests(cluster)
    assert digests.add("m0", "one") == digests.add("m1", "") == digests.add("m2", "one") == ""
    assert digests.add("m3", "other").startswith(
        "the parameters at the end differ: m0 has the digest one, m3 has other"
    )
