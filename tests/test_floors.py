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
    {"errors", "rank_local"},
    {"backend"},
    {"base"},
    {"algorithms"},
    {"machine"},
    {"clock"},
    {"arrays.captures", "arrays.host"},
    {"arrays.cuda"},
    {"arrays"},
    {"layout", "comm.memory"},
    {"comm.*"},
    {"comm.direct"},
    {"comm.shm", "comm.inline", "comm.faults"},
    {"comm.communicator"},
    {"comm.dry", "comm.gpu"},
    {"comm.mpi"},
    {"comm"},
    {"autograd.*", "view", "world"},
    {"autograd.ops", "trace"},
    {"autograd.functions"},
    {"autograd"},
    {"ops", "collectives", "data"},
    {"optim"},
    {"functions", "nn"},
    {"models", "parallel.ddp", "parallel.replicas"},
    {"parallel.operator"},
    {"parallel.sharded"},
    {"parallel"},
    {"runtime.*"},
    {"runtime.ranks"},
    {"runtime.launcher"},
    {"runtime.joined", "runtime.mpi"},
    {"runtime.nodes", "runtime"},
    {"simulate", "predict"},
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
# Imports that reach upward, each inside a function, so that the lower room works without the higher one until a user
# asks for what only the higher one can do.
UPWARD = {
    ("autograd.shardable", "parallel.operator.explain"): "Op.plan prints what a strategy costs",
    ("autograd.op", "parallel.operator.op_call"): "an op with a strategy, called on plain tensors, is refused",
    ("nn.module", "parallel.operator.explain_network"): "Module.plan prints what the strategies of its ops cost",
    ("parallel.operator.auto", "search.planner"): "AutoParallel searches when its step is called first",
    ("world.rank", "runtime.joined.join"): "init joins processes that were started one by one",
    ("compat.torch.distributed.run", "cli.main"): "a command of torch is also one of ours",
}
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


# Rooms that are ordered also where type hints count.
HINTS_COUNT = ("comm", "arrays", "optim")


def code_of(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those for type checkers alone."""
    todo = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            kept = node.orelse if is_typing(node) else [node]
            yield from kept
            todo += kept


@cache
def imports(source: str, hints: bool = False) -> frozenset[str]:
    """Return dotted names of all modules imported in a file: in functions, and by `import_module("...")`.

    `hints`: also those imported for type checkers alone.
    """
    if hints and "TYPE_CHECKING" not in source:
        return imports(source)
    found = set()
    strings = set()
    for node in (ast.walk if hints else code_of)(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    if any(name.startswith("importlib") for name in found):
        found |= {text for text in strings if text.removeprefix("simparallel.") in MODULES}
    return frozenset(found)


def targets(source: str, hints: bool = False) -> set[str]:
    """Return the modules of the package that a file imports."""
    found = set()
    for name in imports(source, hints):
        first, _, rest = name.partition(".")
        if first == "simparallel":
            inner, _, last = rest.rpartition(".")
            found.add(next((module for module in (rest, inner) if module in MODULES), "__init__"))
    return found


def strangers(source: str, module: str, hints: bool = False) -> set[str]:
    """Return the rooms that this module imports and must not."""
    room = room_of(module)
    others = {room_of(name) for name in targets(source, hints) if (module, name) not in UPWARD} - {room}
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
    for module, name in UPWARD:
        graph[module].discard(name)
    assert circles(graph) == []


@pytest.mark.parametrize(("module", "name"), UPWARD)
def test_upward_imports_stand_in_functions(module: str, name: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    at_import = ast.unparse([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))])
    assert name in targets(MODULES[module].read_text()) - targets(at_import)


def hung(source: str) -> list[str]:
    """Return what a file sets on modules or classes that it imports, when it is imported itself."""
    tree = ast.parse(source)
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return [
        ast.unparse(target)
        for target in found
        if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in imported
    ]


def test_imports_change_no_other_module() -> None:
    assert {name: found for name, path in MODULES.items() if (found := hung(path.read_text()))} == {}


def test_change_at_import_is_found() -> None:
    assert hung("from simparallel import ops\nops.Op.planner = 1\nx = ops.Op\nx.y = 2") == ["ops.Op.planner"]


@pytest.mark.parametrize("room", HINTS_COUNT)
def test_type_hints_follow_the_floor_plan(room: str) -> None:
    graph = {name: targets(path.read_text(), hints=True) - {name, "__init__"} for name, path in MODULES.items()}
    inside = {name: graph[name] for name in graph if name.split(".")[0] == room}
    assert circles({name: others & inside.keys() for name, others in inside.items()}) == []
    upward = {name: strangers(MODULES[name].read_text(), name, hints=True) for name in inside}
    assert {name: found for name, found in upward.items() if any(other.split(".")[0] == room for other in found)} == {}


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


def test_type_hint_is_found() -> None:
    source = "if TYPE_CHECKING:\n    from simparallel.comm.communicator import Communicator"
    assert strangers(source, "comm.group") == set()
    assert strangers(source, "comm.group", hints=True) == {"comm.communicator"}


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
