"""The listings that this project began with, as they were printed: MindSpore's tutorials and an article on PyTorch.

The files in `tests/listings` have their lines, unchanged; where a page had lost the indentation, it is back. A listing
that has a slip of its own is run as it is, to see that the error says which, and then with that line mended.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

import simparallel as sp
from simparallel.compat import install

LISTINGS = Path(__file__).parent / "listings"
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import make_data  # noqa: E402

pytestmark = pytest.mark.process


def text_of(name: str) -> str:
    return (LISTINGS / name).read_text()


def run(framework: str, text: str, names: dict | None = None) -> dict:
    """Run a listing in this rank; returns the arrays and numbers that it leaves, parameters of `net` or `model` too."""
    install(framework)
    script = types.ModuleType("__main__")
    script.__dict__.update(names or {})
    sys.modules["__main__"] = script
    exec(compile(text, "listing.py", "exec"), script.__dict__)
    left = {name: value for name, value in vars(script).items() if isinstance(value, (int, float, str, list))}
    for name in ("net", "model", "network"):
        if isinstance(getattr(script, name, None), sp.nn.Module):
            left["state"] = {key: np.copy(value) for key, value in getattr(script, name).state_dict().items()}
    return left


def launch(framework: str, text: str, world_size: int, names: dict | None = None, **settings) -> sp.Results:
    return sp.launch(run, (framework, text, names), world_size=world_size, echo=False, **settings)


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    return make_data.write_mnist(tmp_path_factory.mktemp("mnist"), samples=256)


def losses(log: Path) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in log.read_text().splitlines() if "loss is" in line]


def close(a: dict, b: dict) -> bool:
    return all(np.allclose(a[name], b[name], rtol=1e-4, atol=1e-5) for name in a)


def test_data_parallel(mnist, tmp_path):
    """Eight ranks with 32 samples each train as one device with 256."""
    environment = {"DATA_PATH": str(mnist)}
    many = launch("mindspore", text_of("data_parallel.txt"), 8, log_dir=tmp_path, environment=environment)
    whole = text_of("data_parallel.txt").replace("create_dataset(32)", "create_dataset(256)")
    (one,) = launch("mindspore", whole, 1, environment=environment)
    assert all(close(many[0]["state"], other["state"]) for other in many[1:])
    assert close(many[0]["state"], one["state"])
    found = losses(tmp_path / "worker_3.log")
    assert found[0] == pytest.approx(np.log(10), abs=0.01)
    assert len(found) == 10
    assert found[-1] < found[0]
