"""What a package index gets: an sdist with every file, the wheel that it builds, and what the wheel does alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions

import pytest
from conftest import call
from test_packaging import ROOT, SOURCE, URLS

import simparallel

pytestmark = [pytest.mark.systems, pytest.mark.process]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the last commit twice, in two folders."""
    if subprocess.run(("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout: a release is built from a commit")
    has_builder = any(int(found.version.split(".")[0]) >= 77 for found in distributions(name="setuptools"))
    folders = [tmp_path_factory.mktemp("release") for _ in range(2)]
    for folder in folders:
        call(sys.executable, ROOT / "tools" / "release.py", folder, *["--no-isolation"] * has_builder)
    return folders


@pytest.mark.timeout(240)
def test_commit_gives_the_same_bytes(built):
    """Of the sdist, and of the wheel, which is built from the sdist."""
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in built)
    version = simparallel.__version__
    assert sorted(first) == [f"simparallel-{version}-py3-none-any.whl", f"simparallel-{version}.tar.gz"]
    assert first == second


@pytest.mark.timeout(240)
def test_sdist_has_every_file(built):
    (path,) = built[0].glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        found = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    of_commit = call("git", "ls-tree", "-r", "--name-only", "-z", "HEAD", cwd=ROOT).split("\0")
    assert [name for name in of_commit if name and name not in found] == []


@pytest.mark.timeout(240)
def test_wheel_has_the_package_and_its_addresses(built):
    (path,) = built[0].glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {name.split("/")[0].split("-")[0] for name in names} == {"simparallel", "pytest_simparallel.py"}
    for name, address in URLS.items():
        assert f"\nProject-URL: {name}, {address}\n" in metadata
    assert f"]: {SOURCE}/raw/main/figures/" in metadata  # the README is the index's page


SCRIPT = """\
import sys
import numpy as np
import simparallel as sp

def train():
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 1))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    loss = (model(np.ones((8, 4), np.float32)) ** 2).mean()
    loss.backward()
    optimizer.step()

if __name__ == "__main__":
    sp.launch(train, world_size=2).trace.html("run.html")
    prediction = sp.dry_run(train, world_size=16, cluster="dgx-a100")
    print("dry", prediction.world_size, "devices")
"""
TEST = """\
import numpy as np
import pytest
import simparallel as sp

@pytest.mark.world(2)
def test_sum():
    assert sp.all_reduce(np.ones(3)).tolist() == [2.0, 2.0, 2.0]
"""


def test_demo_writes_its_files(bash, tmp_path):
    bash("simparallel demo -n 2 --epochs 2")
    assert json.loads((tmp_path / "runs" / "demo" / "metrics.json").read_text())["difference_between_ranks"] == 0


def test_lesson_runs(bash, tmp_path):
    shutil.copy(ROOT / "tutorials" / "01_one_device.py", tmp_path)
    assert bash("python 01_one_device.py")


def test_programs_plans_and_traces(bash, tmp_path):
    """Wrong programs, a plan, a run with its page, and a dry run."""
    name = simparallel.zoo.names()[0]
    assert name in bash("simparallel zoo")
    assert bash(f"simparallel zoo {name} --source") == simparallel.zoo.get(name).source
    bash("simparallel plan lenet5 --cluster dgx-h100 -n 4 --out plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "dry 16 devices" in bash("python train.py")
    assert "<html" in (tmp_path / "run.html").read_text()


def test_plugin_runs_tests_on_ranks(bash, tmp_path):
    (tmp_path / "test_sum.py").write_text(TEST)
    assert "1 passed" in bash("python -m pytest -q -p no:cacheprovider test_sum.py")
