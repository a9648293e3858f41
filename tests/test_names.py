"""What tab completion offers: all public names, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import simparallel as sp
from simparallel.errors import SimParallelError


def shown(module: ModuleType) -> set[str]:
    return {name for name in dir(module) if not name.startswith("_")}


@pytest.mark.parametrize("module", [sp, sp.nn, sp.cluster], ids=str)
def test_the_public_names_are_shown(module: ModuleType) -> None:
    assert shown(module) == set(module.__all__)
    assert all(hasattr(module, name) for name in dir(module))
    assert {"__doc__", "__name__", "__all__"} <= set(dir(module))


def test_names_that_are_imported_later_are_shown_before() -> None:
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


def test_errors_are_shown_alone() -> None:
    assert all(issubclass(getattr(sp.errors, name), SimParallelError) for name in shown(sp.errors))
    assert {"RunFailedError", "StrategyError", "SimParallelError"} <= shown(sp.errors)
