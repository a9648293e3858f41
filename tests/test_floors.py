"""The floor plan: a room imports only from lower floors, and no import is circular."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import simparallel

ROOT = Path(simparallel.__file__).parent
# From the ground up. Rooms of one floor do not import each other. "room.*" stands for the files directly in a
# room whose folders are rooms of their own; "room" for its __init__.py, which offers the names of all of them.
FLOORS = (
    {"errors"},
    {"backend"},
    {"base"},
    {"gpu"},
    {"hardware"},
    {"layout", "comm", "autograd.kernels"},
    {"autograd.*", "view", "world"},
    {"autograd.ops", "trace"},
    {"autograd.functions"},
    {"autograd"},
    {"ops", "collectives", "data", "optim"},
    {"functions", "nn"},
    {"models", "parallel.ddp", "parallel.replicas"},
    {"parallel.operator"},
    {"parallel"},
    {"runtime.*"},
    {"runtime.ranks"},
    {"runtime.launcher"},
    {"runtime.joined", "runtime.mpi"},
    {"runtime.nodes", "runtime"},
    {"simulate"},
    {"search"},
    {"testing", "train"},
    {"__init__"},
    {"course"},
    {"compat", "exercises", "zoo"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
APART = {"autograd", "comm"}  # neither imports the other
# A command of torch is also one of ours.
ALLOWED = {("compat.torch.distributed.run", "cli.main")}
ONLY_IN = {
    "cupy": {"backend"},
    "matplotlib": {"view", "cli"},
    "mpi4py": {"comm"},
    "multiprocessing": {"runtime", "cli"},
    "subprocess": {"runtime", "cli"},
    "socket": {"runtime"},
}
FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the dotted name below `simparallel`; "__init__" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """Return the room with the longest name that is a prefix of the module's."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    for name in names:
        if f"{name}.*" in FLOOR_OF and name != module:
            return f"{name}.*"
        if name in FLOOR_OF:
            return name
    return module


def is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def code_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if is_typing(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield other
                yield from code_of(other)
        else:
            yield node
            yield from code_of(node)


@cache
def imports(source: str) -> frozenset[str]:
    """Return dotted names of all modules imported in a file: in functions, and by `import_module("...")`."""
    found = set()
    strings = set()
    for node in code_of(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    if any(name.startswith("importlib") for name in found):
        found |= {text for text in strings if text.removeprefix("simparallel.") in MODULES}
    return frozenset(found)


def targets(source: str) -> set[str]:
    """Return the modules of the package that a file imports."""
    found = set()
    for name in imports(source):
        first, _, rest = name.partition(".")
        if first == "simparallel":
            inner, _, last = rest.rpartition(".")
            found.add(next((module for module in (rest, inner) if module in MODULES), "__init__"))
    return found


def strangers(source: str, module: str) -> set[str]:
    """Return the rooms that this module imports and must not."""
    room = room_of(module)
    others = {room_of(name) for name in targets(source) if (module, name) not in ALLOWED} - {room}
    apart = APART - {room.split(".")[0]} if room.split(".")[0] in APART else set()
    return {other for other in others if FLOOR_OF[other] >= FLOOR_OF[room] or other.split(".")[0] in apart}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one file (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in graph:
        if name not in number:
            visit(name)
    return found


def test_every_room_has_a_floor() -> None:
    without = {room_of(module) for module in MODULES} - set(FLOOR_OF)
    assert not without, "add it to FLOORS and to CONTRIBUTING.md"


def test_imports_follow_the_floor_plan() -> None:
    wrong = {f"{room_of(name)}: {name}": strangers(path.read_text(), name) for name, path in MODULES.items()}
    assert {name: found for name, found in wrong.items() if found} == {}, "a room must not import these"


def test_no_circular_imports() -> None:
    graph = {name: targets(path.read_text()) - {name, "__init__"} for name, path in MODULES.items()}
    assert circles(graph) == []


def test_import_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_libraries_stay_in_their_rooms() -> None:
    used = {name: {found.split(".")[0] for found in imports(path.read_text())} for name, path in MODULES.items()}
    for library, rooms in ONLY_IN.items():
        wrong = [name for name, found in used.items() if library in found and name.split(".")[0] not in rooms]
        assert not wrong, f"only {rooms} may import {library}"


@pytest.mark.parametrize(
    ("source", "module", "found"),
    [
        ("from simparallel.comm import current", "autograd.tensor", {"comm"}),
        ("def f():\n    import simparallel.parallel", "nn.module", {"parallel"}),
        ("from importlib import import_module\nimport_module('simparallel.parallel')", "nn.module", {"parallel"}),
        ("import simparallel as sp", "optim.sgd", {"__init__"}),
        ("from simparallel import autograd", "comm.group", {"autograd"}),
        ("from simparallel.autograd.ops.matmul import MatMul", "autograd.tensor", {"autograd.ops"}),
        ("from simparallel.errors import ShapeError", "autograd.tensor", set()),
        ("if TYPE_CHECKING:\n    from simparallel.nn import Module", "autograd.tensor", set()),
    ],
)
def test_upward_import_is_found(source: str, module: str, found: set[str]) -> None:
    assert strangers(source, module) == found


def test_every_room_of_the_plan_exists() -> None:
    assert {room_of(module) for module in MODULES} == set(FLOOR_OF)


def test_contributing_shows_the_same_plan() -> None:
    text = Path(__file__).parent.parent.joinpath("CONTRIBUTING.md").read_text()
    names = {room.removesuffix(".*").replace(".", "/") for room in FLOOR_OF}
    assert [name for name in names if name != "__init__" and f"`{name}" not in text] == []


def test_files_can_be_read_in_one_sitting() -> None:
    """A file holds one idea, whole; a longer one holds several."""
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 700}
    assert not long
