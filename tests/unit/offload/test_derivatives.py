"""Which operators save an argument for backward and fill it afterwards, by the installed torch's own derivatives.

No version tells such a change: a copy that is made at once is wrong (`offload/activations/forward_spills.py`).
An operator that is new here
needs a case in `tests/integration/offload/test_operators.py`, and a name below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torchgen

DERIVATIVES = Path(torchgen.__file__).parent / "packaged/autograd/derivatives.yaml"
WITH_A_CASE = {
    "rrelu_with_noise": "noise",
    "rrelu_with_noise_": "noise",
    # Backward in training does not use the running statistics.
    "_native_batch_norm_legit": "running_mean running_var",
    "_batch_norm_with_update": "running_mean running_var",
}


def entries(text: str) -> Iterator[tuple[str, str]]:
    """(schema, formulas) of each operator."""
    for entry in text.split("\n- name: ")[1:]:
        schema, _, formulas = entry.partition("\n")
        yield schema, formulas


def filled_late(text: str) -> dict[str, str]:
    """Operators by name, with the arguments that they change and that their derivatives use, `self` left out."""
    found = {}
    for schema, formulas in entries(text):
        changed = re.findall(r"Tensor\([a-z]!\)(?:\[\])?\??\s+(\w+)", schema)
        # What follows a `#` is a comment, and the gradient of an argument stands before a colon.
        code = "\n".join(line.partition("#")[0].partition(":")[2] for line in formulas.splitlines())
        used = [name for name in changed if name not in ("self", "out") and re.search(rf"\b{name}\b", code)]
        if used:
            found[schema.partition("(")[0]] = " ".join(used)
    return found


def test_every_operator_that_fills_what_it_has_saved_has_a_case() -> None:
    assert filled_late(DERIVATIVES.read_text()) == WITH_A_CASE


def test_a_new_one_would_be_found() -> None:
    planted = "\n- name: shiny(Tensor self, Tensor(b!) seed) -> Tensor\n  self: shiny_backward(grad, seed)\n"
    assert filled_late(DERIVATIVES.read_text() + planted) == {**WITH_A_CASE, "shiny": "seed"}
