"""Writes the table of reductions in docs/communicator.md from the code, and from what Gloo and NCCL take.

`python -m docs.reductions` writes it; `tests/unit/comm/test_taken_reductions.py` fails when it is out of date, and
`tests/contract/comm/test_torch_contract.py` carries out what it says, with this backend and with Gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch

from elastrain.comm.collectives.reducing import Reduction, reason_against

PAGE = Path(__file__).parent / "communicator.md"
BEGIN, END = "<!-- reductions: python -m docs.reductions -->", "<!-- /reductions -->"
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
COLUMNS = (*REDUCTIONS, "premul_sum")
ORDERED, BITWISE = {"sum", "prod", "min", "max"}, {"band", "bor", "bxor"}
KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "float32, float64": (torch.float32, torch.float64),
    "float16, bfloat16": (torch.float16, torch.bfloat16),
    "float8 (e4m3fn, e5m2)": (torch.float8_e4m3fn, torch.float8_e5m2),
    "float8 (others)": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    "int8, uint8, int32, int64": (torch.int8, torch.uint8, torch.int32, torch.int64),
    "int16, uint16, uint32": (torch.int16, torch.uint16, torch.uint32),
    "uint64": (torch.uint64,),
    "bool": (torch.bool,),
    "complex32, complex64, complex128": (torch.complex32, torch.complex64, torch.complex128),
}
GLOO: dict[str, set[str]] = {
    "float32, float64": ORDERED | {"avg"},
    "float16, bfloat16": ORDERED | {"avg"},
    "int8, uint8, int32, int64": ORDERED | BITWISE,
    "bool": ORDERED | BITWISE,
    "complex32, complex64, complex128": {"sum", "avg"},
}
NCCL: dict[str, set[str]] = {  # after torch's ProcessGroupNCCL; it views complex numbers as pairs, and has no complex32
    "float32, float64": ORDERED | {"avg", "premul_sum"},
    "float16, bfloat16": ORDERED | {"avg", "premul_sum"},
    "float8 (e4m3fn, e5m2)": ORDERED | {"avg"},
    "int8, uint8, int32, int64": ORDERED | {"avg"},
    "bool": ORDERED,
    "complex32, complex64, complex128": {"sum", "avg", "premul_sum"},
}


def is_taken(reduction: str, dtype: torch.dtype) -> bool:
    """Return True if the backend `elastrain` takes this reduction of this dtype."""
    if reduction == "premul_sum":
        return dtype.is_floating_point or dtype.is_complex
    if reduction == "prod" and dtype.is_complex:
        return False  # torch refuses it before it asks a backend
    return not reason_against(reduction, dtype)  # type: ignore[arg-type] # a name of `REDUCTIONS`


def _cell(reduction: str, kind: str) -> str:
    names = ("elastrain", "Gloo", "NCCL")
    taken = all(is_taken(reduction, dtype) for dtype in KINDS[kind])
    takes = (taken, reduction in GLOO.get(kind, ()), reduction in NCCL.get(kind, ()))
    return ", ".join(name for name, yes in zip(names, takes, strict=True) if yes) or "–"


def table() -> str:
    """Return the table, between its two marks."""
    head = [f"| dtype | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    rows = [f"| {kind} | {' | '.join(_cell(each, kind) for each in COLUMNS)} |" for kind in KINDS]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def page() -> str:
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
