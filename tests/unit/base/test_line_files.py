"""Lines out of bytes, however these come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.base.line_files import LineBuffer


@given(st.lists(st.binary(max_size=5).map(lambda data: data.replace(b"\n", b"")), max_size=6), st.integers(1, 7))
def test_lines_come_out_as_they_went_in(lines: list[bytes], piece: int) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    buffer = LineBuffer(100)
    found = [line for at in range(0, len(stream), piece) for line in buffer.feed(stream[at : at + piece])]
    assert found == lines


@pytest.mark.parametrize("data", [b"x" * 10, b"x" * 10 + b"\n", b"a\n" + b"x" * 10])
def test_a_line_that_is_too_long_is_refused_before_its_end_has_come(data: bytes) -> None:
    with pytest.raises(ValueError, match="a line longer than 10 bytes"):
        LineBuffer(10).feed(data)
    assert LineBuffer(10).feed(b"x" * 9) == []
