"""A decoder is made once, while its module is imported, and not by whichever threads need it first.

msgspec looks at a class when the first decoder for it is made. Two threads that do so at once have ended the process
with SIGSEGV: a `checkpoint export` once, whose threads read their first sections together.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.sources import Source, product

ONE_THREAD = "only commands read it, in one thread"
EXCEPTIONS = {
    "elastrain.offload.planning.profile": ONE_THREAD,
    "elastrain.snapshot.durable.places.node": "numbers and texts: there is no class to look at",
}


def decoders_made_late(source: Source) -> Iterator[int]:
    """The lines of calls such as `msgspec.json.decode(text, type=Kind)`."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or all(each.arg != "type" for each in node.keywords):
            continue
        if ast.unparse(node.func) in ("msgspec.json.decode", "msgspec.msgpack.decode"):
            yield node.lineno


@pytest.mark.slow
def test_decoders_of_classes_are_made_when_their_module_is_imported() -> None:
    found = {source.module: [*lines] for source in product() if (lines := [*decoders_made_late(source)])}
    assert found.keys() == EXCEPTIONS.keys(), found


CRASHES = """
import sys, threading, msgspec
sys.setswitchinterval(1e-6)
for number in range(300):
    kinds = {"msgspec": msgspec, "__name__": "kinds"}
    exec("from __future__ import annotations\\nclass Inner(msgspec.Struct):\\n    a: tuple[int, ...]\\n"
         "class Kind(msgspec.Struct):\\n    x: tuple[Inner, ...]\\n    y: dict[str, Inner]\\n", kinds)
    sys.modules["kinds"] = type(sys)("kinds")
    vars(sys.modules["kinds"]).update(kinds)
    begin = threading.Barrier(4)
    def read():
        begin.wait()
        msgspec.json.decode(b'{"x": [{"a": [1]}], "y": {}}', type=kinds["Kind"])
    threads = [threading.Thread(target=read) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


@pytest.mark.on_demand
def test_msgspec_still_needs_that() -> None:
    """Where this fails, the rule above has no reason any more."""
    assert subprocess.run([sys.executable, "-c", CRASHES], timeout=360).returncode == -11
