"""Bytes from outside are data: nothing in the product makes code, or objects of any class, of them.

The syntax trees of all product files are searched for modules, calls and names that do. Who needs one stands in
EXCEPTIONS with the reason, and an exception that nobody needs any more fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.imports import imports
from tests.support.sources import Source, product

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "copyreg",
    "pickletools",
}
# Calls by their last two names, or by the last one where any object's method of this name is meant.
CALLS = {
    *("eval", "exec", "compile", "breakpoint"),
    *("torch.load", "jit.load", "package.PackageImporter", "hub.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("np.load", "numpy.load", "os.system", "os.popen", "tempfile.mktemp"),
    *("runpy.run_path", "runpy.run_module", "importlib.reload", "code.interact"),
}
# Collectives of torch.distributed that pickle what they carry.
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
# Parts of multiprocessing whose content is pickled.
PICKLING_PARTS = {
    *("Queue", "SimpleQueue", "JoinableQueue", "Pipe", "Manager", "Pool", "Listener", "Client", "Process"),
    *("ForkServerProcess", "SpawnProcess", "ProcessPoolExecutor"),
}
ONLY_FALSE = {"shell", "allow_pickle"}
LAST_NAMES = {call.rpartition(".")[2] for call in CALLS} | OBJECT_COLLECTIVES | PICKLING_PARTS | ONLY_FALSE

SCRIPT = "a waiting worker runs the user's own script, as python does"
EXCEPTIONS = {
    (
        "elastrain.runtime.loader.batch_codec",
        "pickle",
    ): "between a process and its own forks, over sockets without a name",
    ("elastrain.runtime.loader.fork_server", "Process"): "the `fork` context: nothing is pickled",
    (
        "elastrain.launcher.simulated.simulated_nodes",
        "Process",
    ): "the launcher tells its own fork server which node to start, over a socket in a folder of mode 0700",
    ("elastrain.launcher.agent.standby_worker", "exec"): SCRIPT,
    ("elastrain.launcher.agent.standby_worker", "compile"): SCRIPT,
    ("elastrain.launcher.agent.standby_worker", "runpy.run_module"): SCRIPT,
}


def findings(source: Source) -> Iterator[tuple[str, int]]:
    """What is forbidden, and the line that it stands in."""
    for name in imports(source.text, source.module):
        root, *rest = name.split(".")
        if root in MODULES:
            yield root, 0
        if root in ("multiprocessing", "concurrent") and rest and rest[-1] in PICKLING_PARTS:
            yield rest[-1], 0
        if ".".join(name.split(".")[-2:]) in CALLS or (rest and rest[-1] in OBJECT_COLLECTIVES):
            yield name, 0
    for node in ast.walk(source.tree) if source.says(LAST_NAMES) else ():
        if isinstance(node, ast.Call):
            yield from _in_call(node)
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in OBJECT_COLLECTIVES:
                yield name, node.lineno


def _in_call(call: ast.Call) -> Iterator[tuple[str, int]]:
    called = [name for name in (getattr(call.func, "attr", ""), getattr(call.func, "id", "")) if name in LAST_NAMES]
    *_, before, last = ["", "", *(ast.unparse(call.func).split(".") if called else ())]
    # A method of that name is somebody else's: `re.compile`, a model's `eval()`.
    if f"{before}.{last}" in CALLS or (not before and last in CALLS):
        yield f"{before}.{last}".strip("."), call.lineno
    if before and last in PICKLING_PARTS and before not in ("queue", "psutil"):
        yield last, call.lineno
    for keyword in call.keywords:
        if keyword.arg in ONLY_FALSE and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
            yield f"{keyword.arg}=", call.lineno


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return product()


def test_nothing_makes_code_or_objects_of_bytes(sources: list[Source]) -> None:
    found = {(source.module, what): line for source in sources for what, line in findings(source)}
    assert {
        f"{module}:{line}: {what}" for (module, what), line in found.items() if (module, what) not in EXCEPTIONS
    } == set()
    assert EXCEPTIONS.keys() == EXCEPTIONS.keys() & found.keys(), "an exception that nobody needs: strike it"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "def late():\n    import marshal",
        "import importlib\nimportlib.import_module('dill')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.jit.load('x')",
        "eval('1')",
        "exec('x = 1')",
        "import yaml\nyaml.load('x')",
        "import numpy as np\nnp.load('x')",
        "f('x', allow_pickle=True)",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list as b",
        "from torch import load",
        "collective = dist.gather_object",
        "import multiprocessing\nmultiprocessing.Queue()",
        "from multiprocessing.connection import Client",
        "from multiprocessing import Pipe",
        "context.Manager()",
        "from concurrent.futures import ProcessPoolExecutor",
    ],
)
def test_what_is_planted_is_found(text: str) -> None:
    assert list(findings(Source("elastrain.planted", text)))


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile('x')",
        "model.eval()",
        "torch.compile(model)",
        "import queue\nqueue.SimpleQueue()",
        "json.load(x)",
    ],
)
def test_what_only_sounds_alike_is_let_pass(text: str) -> None:
    assert not list(findings(Source("elastrain.planted", text)))
