"""Libraries that the interpreter lacks, and wheels that bring them for one run, without an environment or an index."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"nodes": "simulated nodes", "embedded": "simulated nodes", "gds-cu13": "GPUDirect Storage"}
"""Optional dependencies -> what a run does without them."""
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[.*?\])?(?:>=([\d.]+))?")
_NEVER = ("torch", "triton", "nvidia-", "elastrain")
"""Beginnings of the names of wheels that are left alone: the interpreter's own torch is what is tested."""


@dataclass(frozen=True)
class Requirement:
    """A distribution with its lowest version, and the part of a run that needs it; None: every part."""

    name: str
    least: str = "0"
    only_for: str | None = None

    def __str__(self) -> str:
        return self.name if self.least == "0" else f"{self.name}>={self.least}"


def requirements() -> list[Requirement]:
    """Return what `pyproject.toml` asks for to run, with the extras of `EXTRAS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [_requirement(text, None) for text in project["dependencies"]]
    for extra, purpose in EXTRAS.items():
        found += [_requirement(text, purpose) for text in project["optional-dependencies"][extra]]
    return [each for each in found if each.name != "elastrain"]


def _requirement(text: str, only_for: str | None) -> Requirement:
    match = _REQUIREMENT.match(text)
    assert match is not None, text
    return Requirement(_normal(match[1]), match[2] or "0", only_for)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]


def lacking(wanted: Iterable[Requirement], path: Sequence[str] | None = None) -> list[Requirement]:
    """Return the requirements that no distribution on the path meets (default: the interpreter's own path)."""
    there: dict[str, str] = {}
    for found in distributions(path=list(sys.path if path is None else path)):
        there.setdefault(_normal(found.metadata["Name"] or ""), found.version)
    return [each for each in wanted if each.name not in there or _numbers(there[each.name]) < _numbers(each.least)]


def unpack(folder: Path, into: Path) -> list[str]:
    """Unpack the wheels that fit this interpreter and that it lacks; return their names.

    Wheels of libraries that the interpreter has, in a version that is new enough, are left alone; so is torch.
    """
    wanted = {each.name: each for each in requirements()}
    unpacked: list[str] = []
    for wheel in sorted(folder.glob("*.whl"), reverse=True):
        name = _normal(wheel.name.split("-")[0])
        known = wanted.get(name, Requirement(name))
        if name in unpacked or name.startswith(_NEVER) or not fits(wheel.name) or not lacking([known]):
            continue
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                _extract(archive, member, into)
        unpacked.append(name)
    return unpacked


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, into: Path) -> None:
    """Extract one file with its mode: what a wheel keeps aside as `data` goes where an installer puts it."""
    target = Path(archive.extract(member, into))
    mode = member.external_attr >> 16 & 0o777
    first, kind, *rest = (*Path(member.filename).parts, "", "")
    if first.endswith(".data") and not member.is_dir() and rest[0]:
        place = into if kind in ("purelib", "platlib") else into / ("bin" if kind == "scripts" else kind)
        target = target.rename(_parent_made(place.joinpath(*rest)))
        mode |= 0o111 if kind == "scripts" else 0
    if mode and not member.is_dir():
        target.chmod(mode | 0o600)


def _parent_made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def fits(wheel: str) -> bool:
    """Return True if a wheel's name allows this interpreter and machine."""
    python, abi, system = wheel.removesuffix(".whl").split("-")[-3:]
    minor = sys.version_info.minor
    pythons = {"py3", f"py3{minor}", f"cp3{minor}"}
    if abi == "abi3":
        pythons |= {f"cp3{number}" for number in range(minor + 1)}
    fits_abi = bool(set(abi.split(".")) & {"none", "abi3", f"cp3{minor}"})
    systems = system.split(".")
    fits_system = any("linux" in each and "musl" not in each and each.endswith(platform.machine()) for each in systems)
    return bool(set(python.split(".")) & pythons) and fits_abi and (fits_system or "any" in systems)


def sentence(missing: Sequence[Requirement]) -> str:
    """Return one sentence that says what is missing and which wheels to bring, or that nothing is."""
    always = [str(each) for each in missing if each.only_for is None]
    purposes = {each.only_for: None for each in missing if each.only_for}
    optional = [f"{', '.join(str(e) for e in missing if e.only_for == each)} (for {each})" for each in purposes]
    said = [f"nothing runs without {', '.join(always)}"] if always else []
    said += [f"a run does without {', '.join(optional)}"] if optional else []
    if not said:
        return "Nothing is missing."
    return f"Missing: {'; '.join(said)}: put their wheels into a folder and name it with WHEELS=FOLDER."
