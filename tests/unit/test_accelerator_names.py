"""One place knows torch's accelerators: `torch.cuda` and its like stand behind the port and in the GPUDirect engine."""

from __future__ import annotations

import ast

import pytest

from tests.support.sources import Source, product

KINDS = frozenset({"cuda", "xpu", "npu", "mtia", "mps"})
"""Modules of torch that know one kind of device."""
MAY_NAME = ("elastrain.device.", "elastrain.offload.drives.gds")


def named(source: Source) -> list[str]:
    """Each place that names such a module: by attribute, by import, or by `getattr` with a literal."""
    if not source.says(KINDS):
        return []
    found: list[tuple[int, str]] = []
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            found += [(node.lineno, f"torch.{node.attr}")] if node.attr in KINDS else []
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names if _is_kind(name)]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if _is_kind(alias.name)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            call = ast.unparse(node)
            found += (
                [(node.lineno, call)] if call.startswith(tuple(f"getattr(torch, '{kind}'" for kind in KINDS)) else []
            )
    return [f"{source.module}:{line} {name}" for line, name in found]


def _is_kind(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and len(parts) > 1 and parts[1] in KINDS


def test_only_the_port_and_the_gpudirect_engine_name_torchs_accelerators() -> None:
    beyond = [place for source in product() if not source.module.startswith(MAY_NAME) for place in named(source)]
    assert beyond == []


PLANTS = {
    "an attribute": "import torch\ntorch.cuda.synchronize()",
    "an annotation": "import torch\ndef f(event: torch.cuda.Event) -> None: ...",
    "an import": "import torch.cuda",
    "an import under another name": "import torch.cuda as gpu",
    "an import of a name": "from torch.cuda import Event",
    "an import of the module": "from torch import cuda",
    "an import in a function": "def f():\n    from torch.xpu import synchronize",
    "by a call": "import torch\ngetattr(torch, 'cuda').synchronize()",
}


@pytest.mark.parametrize("text", PLANTS.values(), ids=PLANTS)
def test_what_is_planted_is_found(text: str) -> None:
    assert len(named(Source("elastrain.runtime.planted", text))) == 1


@pytest.mark.parametrize("text", ["torch.backends.cuda.matmul", "tensor.is_cuda", "tensor.cuda", "'torch.cuda'"])
def test_other_names_are_let_pass(text: str) -> None:
    assert named(Source("elastrain.runtime.planted", text)) == []
