"""What several things that are wrong with a network come to, and how nft is told."""

from __future__ import annotations

from elastrain.launcher.namespaces.impairments import (
    Condition,
    Hearing,
    Loss,
    Policed,
    Slow,
    Unplugged,
    between,
    condition,
    drop_rules,
)


def test_pairs_between_two_sides_go_both_ways_or_as_seen_from_the_first() -> None:
    assert between(["a"], ["b", "c"]) == {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")}
    assert between(["a"], ["b", "c"], "out") == {("a", "b"), ("a", "c")}
    assert between(["a"], ["b", "c"], "in") == {("b", "a"), ("c", "a")}


def test_hosts_of_one_side_are_not_parted_from_one_another() -> None:
    assert between(["a", "b"], ["a", "b", "c"]) == {("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}


def test_the_end_of_one_fault_does_not_mend_what_another_still_breaks() -> None:
    cut = Loss(pairs=between(["a"], ["b"]))
    noisy = Loss(pairs=between(["b"], ["a", "c"]), percent=5.0)
    policed = Policed(pairs=between(["a"], ["b"], "out"), bits_per_s=800)
    gone, bad = Hearing(percent_lost=100.0), Hearing(percent_lost=5.0)
    both = condition([noisy, cut, policed])
    gone_and_slow = Hearing(percent_lost=100.0, bits_per_s=800)
    assert both.hearing == {"a": {"b": gone}, "b": {"a": gone_and_slow, "c": bad}, "c": {"b": bad}}
    assert condition([noisy]).hearing["a"] == {"b": bad}
    slow = [Slow(host="a", bits_per_s=10), Slow(host="a", bits_per_s=5)]
    plugs = [Unplugged(host="a"), Unplugged(host="a")]
    assert condition([*slow, *plugs]) == Condition(rates={"a": 5}, unplugged=frozenset({"a"}))
    assert condition([]) == Condition()


def test_nft_is_told_one_table_that_replaces_the_former() -> None:
    heard = {"10.0.0.2": Hearing(percent_lost=100.0), "10.0.0.1": Hearing(percent_lost=2.5, bits_per_s=8000)}
    assert drop_rules(heard) == (
        "table inet elastrain {}\n"
        "delete table inet elastrain\n"
        "table inet elastrain {\n"
        "chain input {\n"
        "type filter hook input priority 0; policy accept;\n"
        "ip saddr 10.0.0.1 numgen random mod 10000 < 250 drop\n"
        "ip saddr 10.0.0.1 limit rate over 1000 bytes/second burst 65536 bytes drop\n"
        "ip saddr 10.0.0.2 drop\n"
        "}\n"
        "}\n"
    )
