"""A clock that jumps changes nothing: wall-clock time is read for people, for the age of checkpoints, and for numbers
that only have to be new.

The syntax trees of all product files are searched. Who needs it stands in READERS with what for, and one that needs it
no more fails too.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Iterator

import pytest

from tests.support.sources import Source, product

CALLS = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime"),
    *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
}
CLOCKS = {"CLOCK_REALTIME", "CLOCK_REALTIME_COARSE", "CLOCK_TAI"}
LAST_NAMES = {call.rpartition(".")[2] for call in CALLS} | CLOCKS
READS_A_CLOCK = re.compile(rf"\.\s*(?:{'|'.join(sorted(LAST_NAMES))})\b|from\s+(?:time|datetime)\s+import")
"""What the text of a reading looks like. A file without it need not be parsed."""

READERS = {
    "elastrain.snapshot.durable.retention": "the age of checkpoints (--keep-for)",
    "elastrain.runtime.durable.member_checkpoints": "when a checkpoint was made, in its manifest",
    "elastrain.snapshot.durable.conversion": "when a checkpoint was made, in its manifest",
    "elastrain.launcher.shared.rundir": "`wall` in the event log; `t` beside it is monotonic",
    "elastrain.launcher.cli.commands.checkpoint": "`checkpoint ls` shows the age",
    "elastrain.launcher.cli.options.node_options": "the job's name, where none is given",
    "elastrain.launcher.agent.worker_monitor": "the heading of written stacks",
    "elastrain.runtime.loop_state.loop_numbers": "numbers of a script that are clock times are left alone",
    "elastrain.integrations.transformers": "the start of training, for the speeds that transformers logs",
    "elastrain.launcher.agent.run_state": "when the state was told, for readers",
    "elastrain.launcher.cli.commands.status": "ages of what is shown",
    "elastrain.launcher.watch.top_screen": "likewise",
    "elastrain.launcher.watch.metrics.metrics_server": "likewise",
    "elastrain.launcher.watch.report.page": "the heading of a report",
    "elastrain.launcher.watch.preflight.peer_link": "doctor compares the clocks of two machines",
    "elastrain.launcher.shared.clocks": "nodes compare their clocks once, and one that is far off is refused",
    "elastrain.launcher.nodes.served_files": "a file that has just been changed may still be written",
    "elastrain.runtime.loggers.event_files": "the time of each event, for readers, and a file name that sorts last",
}


def readings(source: Source) -> Iterator[int]:
    """The lines in which wall-clock time is read."""
    text = unicodedata.normalize("NFKC", source.text)
    for node in source.nodes if READS_A_CLOCK.search(text) else ():
        if isinstance(node, ast.Attribute) and node.attr in LAST_NAMES:
            *_, before, last = ["", "", *ast.unparse(node).split(".")]
            if f"{before}.{last}" in CALLS or last in CLOCKS:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if names & CALLS or (node.module == "time" and {alias.name for alias in node.names} & CLOCKS):
                yield node.lineno


def test_wall_clock_time_is_read_where_it_decides_nothing() -> None:
    found = {source.module: line for source in product() for line in readings(source)}
    assert {f"{module}:{line}" for module, line in found.items() if module not in READERS} == set()
    assert READERS.keys() == READERS.keys() & found.keys(), "one that needs it no more: strike it"


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "from time import time",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\ndatetime.utcnow()",
        "import time\ntime.clock_gettime(time.CLOCK_REALTIME)",
        "import time\nclock = time.time_ns",
    ],
)
def test_a_reading_is_seen(text: str) -> None:
    assert list(readings(Source(module="m", text=text)))


def test_monotonic_time_is_free() -> None:
    text = "import time\ntime.monotonic()\ntime.perf_counter()\ntime.sleep(1)"
    assert not list(readings(Source(module="m", text=text)))
