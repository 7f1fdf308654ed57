"""`make test` runs every test that a change can reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.choose import chosen
from tests.support.sources import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "reached", "not_reached"),
    [
        (
            "offload/planning/booking.py",
            "tests/unit/offload/lifetimes/test_plan.py",
            "tests/integration/runtime/test_kills.py",
        ),
        (
            "offload/activations/manager.py",
            "tests/integration/runtime/test_memory_budget.py",
            "tests/unit/comm/test_algorithms.py",
        ),
        ("elastrain/member/commit_rules.py", "tests/sim/test_schedules.py", "tests/unit/offload/test_policy.py"),
        ("launcher/core/joins.py", "tests/integration/launcher/test_nodes.py", "tests/unit/comm/test_algorithms.py"),
        (
            "comm/torch_backend/survival.py",
            "tests/integration/comm/test_surviving.py",
            "tests/unit/offload/test_policy.py",
        ),
        ("README.md", "tests/unit/test_readme_figures.py", "tests/unit/job/test_fold.py"),
    ],
)
def test_what_a_change_reaches(path: str, reached: str, not_reached: str) -> None:
    assert all((ROOT / each).exists() for each in (path, reached, not_reached))
    tests = chosen([path])
    assert reached in tests and not_reached not in tests
    assert "tests/unit/test_layers.py" in tests, "it reads all sources"


def test_in_a_small_tree_a_change_reaches_what_imports_it(tmp_path: Path) -> None:
    texts = {
        "elastrain/__init__.py": (
            "if TYPE_CHECKING:\n    from elastrain.far import act\n    from elastrain.high import init"
        ),
        "elastrain/far.py": "",
        "elastrain/low.py": "",
        "elastrain/high.py": "from elastrain import low",
        "tests/test_low.py": "import elastrain.low",
        "tests/test_high.py": "def test():\n    from elastrain.high import low",
        "tests/test_named.py": 'PROGRAM = "import elastrain; elastrain.init()"',
        "tests/test_script.py": 'SCRIPT = "folder/training.py"',
        "tests/integration/scripts/training.py": "import elastrain as e\ne.act()",
        "tests/test_page.py": 'PAGE = "page.md"',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    above = ["tests/test_high.py", "tests/test_named.py", "tests/test_script.py"]
    assert chosen(["elastrain/far.py"], tmp_path) == ["tests/test_script.py"]
    assert chosen(["elastrain/low.py"], tmp_path) == sorted([*above, "tests/test_low.py"])
    assert chosen(["elastrain/high.py"], tmp_path) == above
    assert chosen(["page.md", "tests/test_low.py"], tmp_path) == ["tests/test_low.py", "tests/test_page.py"]


def test_a_change_of_the_settings_reaches_everything() -> None:
    assert chosen(["docs/index.md", "pyproject.toml"]) == ["tests"]


@pytest.mark.slow
def test_a_test_file_that_changed_is_chosen() -> None:
    assert "tests/unit/job/test_fold.py" in chosen(["tests/unit/job/test_fold.py"])
