"""The words of `elastrain inject` and of faults files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.errors import ConfigError
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.fault import Fault, Moment, Scheme, Target
from elastrain.launcher.faults.grammar import read_faults
from elastrain.launcher.faults.table import CLASSES, DAY, Lasting, Option, as_data, as_text, settings

M1 = (Target(scheme=Scheme.MEMBER, name="m1"),)


def test_fault_at_once_has_no_place() -> None:
    fault = grammar.parse("kill --target member:m1")
    assert (fault, fault.place.at_once) == (Fault(kind="kill", targets=M1), True)


@pytest.mark.parametrize(
    ("at", "place"),
    [
        ("step=3,phase=commit", Moment(step=3, phase="commit")),
        ("phase=commit,step=3", Moment(step=3, phase="commit")),
        ("step=0", Moment(step=0)),
        ("phase=join", Moment(phase="join")),
        ("t=0", Moment(t_s=0.0)),
        ("t=12.5", Moment(t_s=12.5)),
        ("t=3,phase=commit", Moment(t_s=3.0, phase="commit")),
    ],
)
def test_place_is_a_step_or_a_phase_or_both_or_a_time(at: str, place: Moment) -> None:
    assert grammar.parse(f"kill --target member:m1 --at {at}") == Fault(kind="kill", targets=M1, place=place)


def test_options_have_defaults_and_the_line_shows_those_that_were_given() -> None:
    fault = grammar.parse("slow --target member:m1 --how=sleep --for 2.5")
    assert settings(fault) == {"factor": 3.0, "how": "sleep"}
    assert str(fault) == "slow --target member:m1 --for 2.5 --how sleep"


def test_several_targets_are_one_fault_each() -> None:
    fault = grammar.parse("kill --target member:m1,member:m2,member:random")
    assert [str(single) for single in fault.singles()] == [
        "kill --target member:m1",
        "kill --target member:m2",
        "kill --target member:random",
    ]


def test_class_with_one_possible_target_needs_none() -> None:
    assert str(grammar.parse("etcd-stop --at t=3")) == "etcd-stop --target etcd --at t=3"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("maim --target member:m1", "unknown fault class 'maim': known are kill"),
        ("kill --target m1", "write member:ID"),
        ("kill --target member:", "write member:ID"),
        ("kill --target node:", "unknown target 'node:'"),
        ("kill --target etcd", "kill does not strike etcd: write --target member:ID or node:NAME"),
        ("etcd-stop --target etcd:x", "unknown target 'etcd:x'"),
        ("hang --target node:node1", "hang does not strike a node: write --target member:ID"),
        ("kill --target member:m1,member:m1", "names one thing twice"),
        ("kill --target member:m1,node:node1", "mixes kinds"),
        ("kill", "--target is missing: write --target member:ID or node:NAME"),
        ("kill --target member:m1 --at phase=lunch", "unknown phase 'lunch': known are join, forward"),
        ("kill --target member:m1 --at step=-1", "write step=N"),
        ("kill --target member:m1 --at step=x", "write step=N"),
        ("kill --target member:m1 --at step=1,step=2", "write step=N"),
        ("kill --target member:m1 --at phase=join,phase=join", "write step=N"),
        ("kill --target member:m1 --at ''", "write step=N"),
        ("kill --target member:m1 --at t=-1", "or t=SECONDS"),
        ("kill --target member:m1 --at t=nan", "or t=SECONDS"),
        ("kill --target member:m1 --at t=1,step=2", "a time cannot be combined"),
        ("exception --target member:m1 --at phase=commit", "exception does not strike in phase commit: it does in for"),
        ("kill --target member:m1 --for 3", "'--for' is unknown for kill, which takes --target, --at"),
        ("slow --target member:m1 --for 0", "--for '0': write a number of seconds"),
        ("slow --target member:m1 --factor 0.5", "--factor '0.5' of slow: write a number from 1 to 1000"),
        ("slow --target member:m1 --factor much", "--factor 'much' of slow"),
        ("device-error --target member:m1 --after 1.5", "write a whole number from 0 to 1000000"),
        ("hang --target member:m1 --how deeply", "--how 'deeply' of hang: write one of loop, lock, forward"),
        ("flip --target member:m1 --where there", "--where 'there' of flip: write one of parameters, taken,"),
        ("kill --target 'member:m1", "No closing quotation"),
        ("kill --target member:m1 loudly", "'loudly' is unknown for kill"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        grammar.parse(line)


# ---- every class


def _values(option: Option) -> st.SearchStrategy[str | int | float]:
    if isinstance(option.default, str):
        return st.sampled_from(option.choices)
    if option.is_whole:
        return st.integers(int(option.least), int(option.most))
    return st.floats(option.least, option.most)


NAMES = st.from_regex(r"[a-z0-9_]{1,5}", fullmatch=True)
LINKS = st.tuples(NAMES, NAMES).filter(lambda ends: ends[0] != ends[1]).map("-".join)
PLACES = (
    st.builds(Moment, step=st.none() | st.integers(0, 99)) | st.builds(Moment, t_s=st.floats(0, DAY)),
    st.floats(1e-3, DAY),
)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    row = draw(st.sampled_from(list(CLASSES.values())))
    scheme = draw(st.sampled_from(row.targets))
    names = {Scheme.ETCD: st.just(""), Scheme.LINK: LINKS}.get(scheme, NAMES)
    place = draw(PLACES[0])
    if draw(st.booleans()):
        place = replace(place, phase=draw(st.sampled_from(row.phases)))
    options = tuple((each.name, draw(_values(each))) for each in row.options if draw(st.booleans()))
    return Fault(
        kind=row.name,
        targets=tuple(Target(scheme=scheme, name=name) for name in draw(st.lists(names, min_size=1, unique=True))),
        place=place,
        for_s=None if row.lasting is Lasting.NO else draw(st.none() | PLACES[1]),
        options=options,
    )


@given(faults())
def test_every_fault_prints_as_a_line_that_reads_back_as_it(fault: Fault) -> None:
    assert grammar.parse(str(fault)) == fault


def test_the_table_is_printed_whole_and_within_the_screen() -> None:
    text = as_text()
    assert all(len(line) <= 118 for line in text.splitlines())
    for row in as_data():
        assert re.search(rf"^{row['name']} ", text, re.MULTILINE)
        assert all(f"--{option['name']} " in text for option in row["options"])


# ---- files


def test_file_has_one_fault_per_line_with_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    path.write_text(
        "# two kills\n\nkill --target member:m1 --at step=3,phase=backward # here\n"
        "kill --at=step=5 --target=member:random\n"
    )
    assert [str(fault) for fault in read_faults(path)] == [
        "kill --target member:m1 --at step=3,phase=backward",
        "kill --target member:random --at step=5",
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("maim --target member:m1 --at step=1", "unknown fault class 'maim'"),
        ("kill --at step=1", "--target is missing"),
        ("kill --target member:m1", "--at is missing"),
        ("kill --target member:m1 --at", "--at needs a value"),
        ("kill --target member:m1 --at step=1 --loud yes", "'--loud' is unknown"),
        ("kill --target member:m1 --target member:m2 --at step=1", "given twice"),
        ("kill --target member:m1 --at phase=lunch", "unknown phase 'lunch'"),
        ("kill --target 'member:m1 --at step=1", "No closing quotation"),
    ],
)
def test_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "faults"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_faults(path)
    assert sentence in str(caught.value)


def test_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_faults(tmp_path / "nowhere")
