"""Reach: public names, commands, fronts, lessons and pages lead to every product file and name; tests do not count."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from test_floors import MODULES, ROOT, targets

from simparallel.compat.imports import FRONTS

sys.path.append(str(ROOT.parent / "docs" / "extensions"))
from public_names import main_names

# What stands beside the package, for users.
BESIDE = [
    path
    for pattern in ("*", "docs/*", "docs/extensions/*", "tutorials/*", "figures/*", "examples/**/*", "benchmarks/**/*")
    for path in ROOT.parent.glob(pattern)
    if path.suffix in (".cfg", ".md", ".py") and path.name != "CHANGELOG.md"
]
# Used where no search for names sees it.
USED = {"FigureCanvas": "matplotlib looks for it in the module of a backend"}
DEFINITION = re.compile(r"^(?P<method> {4})?(?:def|class) (?P<name>\w+)|^@(?P<decorator>\w+)|^\w", re.M)
# Docstrings and comments use nothing, nor does a definition use its own name.
WORD = re.compile(r'"""[\s\S]*?"""|#.*|(?:def|class) \w+|"((?:\\.|[^"\\\n])*)"|(\w+)')

# Names that a front takes from another module, see `compat.front.take`.
TABLE = re.compile(r'"""\n([\w\s]+)"""')


def is_of_front(module: str) -> bool:
    """Return whether scripts import a module, and use its names, as one of MindSpore or PyTorch."""
    return f"{module}.".startswith(tuple(f"compat.{front}." for front in FRONTS))


def modules_in(text: str) -> set[str]:
    """Return the modules that a text names in full, such as `python -m simparallel.compat`."""
    found = set()
    for name in re.findall(r"\bsimparallel\.([\w.]+\w)", text):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found |= {name, f"{name}.__main__"} & set(MODULES)
    return found


def next_modules(module: str) -> set[str]:
    """Return the modules that a module imports, names in a string, or makes the names of."""
    source = MODULES[module].read_text()
    texts = re.findall(r'(?<!")"([^"\n]+)"(?!")', source)  # docstrings have three quotes
    found = targets(source).union(*map(modules_in, texts))
    if "import_module(" in source:  # f"simparallel.{room}", and "room" is a string of the file
        starts = re.findall(r'"simparallel\.([\w.]*){', source)
        found |= {start + text for start in starts for text in texts} & set(MODULES)
    if "iter_modules(__path__)" in source:
        found |= {name for name in MODULES if name.startswith(f"{module}.")}
    parts = module.split(".")
    return found | {".".join(parts[:count]) for count in range(1, len(parts))} & set(MODULES)


def reached() -> set[str]:
    """Return the modules that users get to."""
    todo = {"__init__", "__main__", *filter(is_of_front, MODULES)}
    todo = todo.union(*(modules_in(path.read_text()) for path in BESIDE))
    found: set[str] = set()
    while todo:
        module = todo.pop()
        found.add(module)
        todo |= next_modules(module) - found
    return found


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yield (class or "", name) of the functions, classes and methods of a file.

    A function of the package that decorates one may enter it in a table, so those are left out.
    """
    owner, is_entered = "", False
    for found in DEFINITION.finditer(source):
        if decorator := found["decorator"]:
            is_entered |= not re.search(rf"^from (?!simparallel)\S+ import .*\b{decorator}\b", source, re.M)
            continue
        if found["name"] and not (is_entered and not found["method"]):
            yield owner if found["method"] else "", found["name"]
        if not found["method"]:
            owner, is_entered = found["name"] or "", False


def names_in(source: str) -> set[str]:
    """Return the names that code uses: words, strings that are names or tables of them, and what f-strings show."""
    found = {name for table in TABLE.findall(source) for name in table.split()}
    for text, word in WORD.findall(source):
        shown = [text] if re.fullmatch(r"[\w.:]+", text) else re.findall(r"{([^{}]+)", text)
        found |= {word}.union(*(re.findall(r"\w+", part) for part in shown))
    return found


def overrides(module: str, owner: str, name: str) -> bool:
    """Return whether a method replaces one of a class of a library, which calls it."""
    bases = inspect.getmro(getattr(import_module(f"simparallel.{module}"), owner)) if owner else ()
    return any(name in vars(base) for base in bases if not base.__module__.startswith("simparallel"))


@cache
def used_outside() -> set[str]:
    """Return the public names, with members of public classes, and the names in scripts and in the code of pages."""
    names = main_names()
    found = {name.last for name in names} | set(USED)
    found |= {member for name in names if inspect.isclass(name.thing) for member in dir(name.thing) if member[0] != "_"}
    for path in BESIDE:
        found |= (
            names_in(path.read_text()) if path.suffix == ".py" else {*re.findall(r"(?<=[.`])\w+", path.read_text())}
        )
    return found


def unused(sources: dict[str, str]) -> list[str]:
    """Return the functions, classes and methods whose names no product file and nothing for users uses."""
    used = used_outside().union(*map(names_in, sources.values()))
    return [
        f"{module}: {name}"
        for module, source in sources.items()
        if not is_of_front(module)
        for owner, name in definitions(source)
        # Python and IPython call _names_.
        if name not in used and not re.fullmatch(r"_\w+_", name) and not overrides(module, owner, name)
    ]


def test_every_file_is_reached() -> None:
    assert set(MODULES) - reached() == set(), "only tests use it: move it to tests/, or delete it"


def test_every_name_is_used() -> None:
    found = unused({name: path.read_text() for name, path in MODULES.items()})
    assert found == [], "only tests use it: move it to tests/, or delete it"


def test_unreached_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.joinpath("lonely.py").write_text("from simparallel.errors import InputError")
    tmp_path.joinpath("other.py").write_text("import simparallel.lonely")
    monkeypatch.setitem(MODULES, "lonely", tmp_path / "lonely.py")
    monkeypatch.setitem(MODULES, "view.other", tmp_path / "other.py")
    assert {"lonely", "view.other"} & reached() == set()
    monkeypatch.setitem(MODULES, "autograd.ops.other", tmp_path / "other.py")  # all families are imported
    assert {"lonely", "view.other"} & reached() == {"lonely"}


def test_unused_name_is_found() -> None:
    source = '''
from functools import cache
from simparallel.course.zoo.entry import wrong
@cache
def lonely_function():
    """Unlike lonely_method()."""
    return here.used_attribute  # lonely_function
@wrong("…")
def entered(): return used_function
class WrongProgram:
    def used_attribute(self): return getattr(self, "used_by_name"), f"{self.used_in_text} but not lonely_method"
    def used_by_name(self): return WrongProgram
    def used_in_text(self): return "a text about lonely_method"
    def lonely_method(self): return 0
    def _repr_html_(self): return ""
def used_function(): return 0
'''
    assert unused({"course.zoo.entry": source}) == [
        "course.zoo.entry: lonely_function",
        "course.zoo.entry: lonely_method",
    ]
