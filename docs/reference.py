"""Makes the pages of the API reference while MkDocs runs: one per module, and its part of the navigation.

The folder listing decides, so that a module that is added, moved or renamed needs no line here.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = "reference/index.md"
FOLDERS = {
    "elastrain": "The pure parts",
    "elastrain/member": "A member's machine",
    "elastrain/protocol": "Its events and commands",
    "elastrain/buffers": "Its buffers",
    "elastrain/base": "What several rooms need",
    "elastrain/runtime": "The worker",
    "launcher/core": "The agent's machine",
}
ROOMS = ("comm", "snapshot", "offload", "launcher")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the reference to the navigation."""
    assert config.nav is not None
    config.nav.append({"Reference": [PUBLIC, *({title: pages} for title, pages in _navigation().items())]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages themselves."""
    files.append(File.generated(config, PUBLIC, content=_public_page()))
    for folder in _folders():
        for path in _modules(folder):
            name = _dotted(path)
            files.append(File.generated(config, _page(path), content=f"# {name}\n\n::: {name}\n"))
    return files


def _public_page() -> str:
    names = (
        "elastrain.init",
        "elastrain.Job",
        "elastrain.DataLoader",
        "elastrain.from_torch",
        "elastrain.LossScale",
        "elastrain.runtime.loop.step.Step",
        "elastrain.offload.save_on_disk",
        "elastrain.comm.surviving",
        "elastrain.comm.reconfigure",
        "elastrain.comm.handle",
        "elastrain.comm.monitored_barrier",
    )
    head = (
        "What a training script uses; its [errors](elastrain/errors.md) too. All other pages here are for developers."
    )
    return f"# Reference\n\n{head}\n\n" + "\n".join(f"::: {name}\n" for name in names)


def _navigation() -> dict[str, list[dict[str, str]]]:
    return {_title(folder): [{path.stem: _page(path)} for path in _modules(folder)] for folder in _folders()}


def _folders() -> list[Path]:
    """Each package's folder, once: the links below elastrain/ lead to folders at the top."""
    tops = [ROOT / "elastrain", *(ROOT / room for room in ROOMS)]
    found = [folder for top in tops for folder in (top, *sorted(top.rglob("*/")))]
    return [folder for folder in found if not _is_linked(folder) and _modules(folder)]


def _is_linked(folder: Path) -> bool:
    return any(part.is_symlink() for part in (folder, *folder.parents) if ROOT in part.parents)


def _modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if not path.stem.startswith("__"))


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "elastrain" else ("elastrain", *parts))


def _page(path: Path) -> str:
    return f"reference/{_dotted(path).replace('.', '/')}.md"


def _title(folder: Path) -> str:
    relative = str(folder.relative_to(ROOT))
    return FOLDERS.get(relative, relative)
