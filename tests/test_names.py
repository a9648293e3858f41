"""Names: tab completion offers the public ones and nothing else; names of tests are short handles."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from refusals import refused
from test_floors import MODULES, ROOT

import simparallel as sp
from simparallel.base import hints
from simparallel.errors import SimParallelError
from simparallel.parallel import pipeline

sys.path.append(str(ROOT.parent / "docs" / "extensions"))
from public_names import public_names


def shown(module: ModuleType) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


@pytest.mark.parametrize("module", [sp, sp.nn, sp.nn.init, sp.cluster], ids=str)
def test_public_names_are_shown(module: ModuleType) -> None:
    assert shown(module) == set(module.__all__)
    assert all(hasattr(module, name) for name in dir(module))
    assert {"__doc__", "__name__", "__all__"} <= set(dir(module))


def test_lazy_names_are_shown_before_import() -> None:
    text = "import sys, simparallel as sp; names = dir(sp); assert 'simparallel.nn' not in sys.modules; print(*names)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert {"nn", "launch", "Cluster", "__version__"} <= set(names)
    assert not {"Any", "TYPE_CHECKING", "import_module", "logging"} & set(names)


def test_functions_are_shown_alone() -> None:
    names = shown(sp.functions)
    assert {"conv2d", "cross_entropy", "max", "scaled_dot_product_attention", "to", "transpose"} <= names
    assert all(callable(getattr(sp.functions, name)) for name in names)
    assert not {"Any", "Tensor", "as_tensor", "op", "operands", "shape", "spread", "sys"} & names


def test_all_functions_are_exported() -> None:
    """For type checkers, which treat no other name of a module as public."""
    assert shown(sp.functions) == set(sp.functions.__all__)


def test_ops_are_shown_alone() -> None:
    assert importlib.import_module("simparallel.ops") is sp.ops
    helpers = {"Context", "Op", "Plan", "Spec", "Work"}
    assert helpers < shown(sp.ops)
    assert all(issubclass(getattr(sp.ops, name), sp.ops.Op) for name in shown(sp.ops) - helpers)


@pytest.mark.parametrize(
    ("module", "name"),
    [(sp, "cat"), (sp, "randn"), (sp, "Linear"), (sp, "DataLoader"), (sp.nn, "functional"), (sp.nn, "Dense")],
)
def test_missing_name_says_where_to_look(module: ModuleType, name: str) -> None:
    with refused(AttributeError) as caught:
        getattr(module, name)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with refused(AttributeError):
        getattr(module, "nowhere_at_all")  # noqa: B009


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("DeviceMesh", "here it is simparallel.Mesh."),
        ("DTensor", "here it is simparallel.Layout"),
        ("lanch", "Did you mean launch?"),
        ("FSDP", "here it is simparallel.parallel.fully_shard(module)"),
        ("ring_attention", "docs/not_here.md"),
    ],
)
def test_unknown_name_is_answered(name: str, answer: str) -> None:
    """Elsewhere, misspelt, or missing; a name such as __wrapped__, for which tools probe, is looked up nowhere."""
    with pytest.raises(AttributeError) as caught:
        getattr(sp, name)
    assert answer in str(caught.value)
    assert not hasattr(sp, name)
    assert str(hints.Answer("simparallel", "__wrapped__")).endswith("has no attribute '__wrapped__'")


def test_every_hint_can_be_followed() -> None:
    """What an answer names exists; a feature that it calls missing has a row on the page."""
    here, missing = hints._table()
    rooms = {"simparallel": sp, "numpy": np, "module": sp.nn.Linear(1, 1), "x": sp.Tensor([1.0]), "scipy": None}
    for answer in {*here.values(), *missing.values()}:
        for path in re.findall(r"\b(?:simparallel|numpy|module|x)\.[.\w]*\w", answer):
            found: Any = rooms[path.split(".")[0]]
            for attribute in path.split(".")[1:]:
                found = getattr(found, attribute)
    rows = [
        line.split("|")[1] for line in (ROOT.parent / "docs" / "not_here.md").read_text().splitlines() if "|" in line
    ]
    for answer in set(missing.values()):
        assert any(row.strip().startswith(answer.split(":")[0]) for row in rows), answer


def test_errors_are_shown_alone() -> None:
    assert all(issubclass(getattr(sp.errors, name), SimParallelError) for name in shown(sp.errors))
    assert {"RunFailedError", "StrategyError", "SimParallelError"} <= shown(sp.errors)


def long_names(source: str) -> list[str]:
    """Return the names of the test functions in a file's text that are longer than 50 characters."""
    return re.findall(r"^ *(?:async )?def (test_\w{46,})\(", source, re.MULTILINE)


def test_test_names_are_handles() -> None:
    """A name is at most 50 characters; the sentence belongs in the docstring."""
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    assert len(files) > 100
    assert {file.name: names for file in files if (names := long_names(file.read_text()))} == {}


def test_long_test_name_is_found() -> None:
    """Red control, also inside a class and on either side of the limit."""
    name = "test_" + "x" * 46
    source = f"def {name}(): ...\nclass Tests:\n    def {name}y(self): ...\n    def {name[:-1]}(self): ...\n"
    assert long_names(source) == [name, f"{name}y"]


def used_again(sources: Mapping[str, str], public: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the class names that several modules define, and these modules. Classes inside of functions count, too.

    Two exemptions:
    public names, because users write their namespaces, too: sp.ops.Linear, sp.nn.Linear, sp.optim.schedules.Linear;
    the fronts in `compat`, because they spell another framework's names.

    Args:
        sources: module -> its text.
        public: (module, class) of the public names.
    """
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        if not module.startswith("compat."):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).add(module)
    return {
        name: sorted(modules)
        for name, modules in found.items()
        if len(modules) > 1 and not all((module, name) in public for module in modules)
    }


def test_a_class_name_is_used_once() -> None:
    things = [name.thing for name in public_names()] + [getattr(pipeline, name) for name in pipeline.__all__]
    public = {(x.__module__.removeprefix("simparallel."), x.__name__) for x in things if inspect.isclass(x)}
    assert used_again({name: path.read_text() for name, path in MODULES.items()}, public) == {}


def test_class_name_used_again_is_found() -> None:
    """Red control: a class of a function counts; one that is not public is not exempt."""
    sources = {
        "a": "class Move: ...\nclass Linear: ...\nclass Pad: ...",
        "b": "def f():\n    class Move: ...\nclass Linear: ...",
        "compat.c": "class Pad: ...",
    }
    public = {("a", "Linear"), ("b", "Linear"), ("a", "Move")}
    assert used_again(sources, public) == {"Move": ["a", "b"]}
    assert used_again(sources, ()) == {"Move": ["a", "b"], "Linear": ["a", "b"]}
