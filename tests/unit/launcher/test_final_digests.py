"""The digests with which members have passed the end, by example."""

from __future__ import annotations

from elastrain.launcher.core.progress import FinalDigests


def test_a_member_with_a_part_of_the_parameters_has_no_digest_to_differ_by() -> None:
    digests = FinalDigests()
    assert digests.add("m0", "one") == digests.add("m1", "") == digests.add("m2", "one") == ""
    assert digests.missing(["m0", "m3"]) == ["m3"]
    assert digests.add("m3", "other").startswith(
        "the parameters at the end differ: m0 has the digest one, m3 has other"
    )
