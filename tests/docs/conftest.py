"""The package as its users have it: built as a wheel, installed, and called in a folder outside of the checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import site
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("simparallel", "pytest_simparallel.py", "pyproject.toml", "setup.cfg", "README.md", "LICENSE", "MANIFEST.in")


def call(*words: object, **settings: object) -> str:
    ended = subprocess.run(
        list(map(str, words)),
        timeout=100,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **settings,  # type: ignore[call-overload]
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory, testrun_uid):
    """Install the wheel in a fresh environment, which finds all other packages where this one has them.

    The first worker that needs it makes it for all.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"wheel-{testrun_uid}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            install(folder)
            (folder / "done").touch()
    return folder / "venv" / "bin"


def install(folder: Path) -> None:
    (checkout := folder / "checkout").mkdir()
    # A copy, because a build leaves files behind.
    for name in SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, checkout / name)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    # Without a setuptools that can build it here, pip downloads one.
    has_builder = any(int(found.version.split(".")[0]) >= 77 for found in distributions(name="setuptools"))
    call(*pip, "wheel", "--no-deps", *["--no-build-isolation"] * has_builder, "-w", folder, checkout)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("simparallel-*.whl")
    call(*pip, "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    # Paths in a .pth file; further .pth files there, such as that of an editable installation, are not read.
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    where = call(python, "-I", "-c", "import simparallel; print(simparallel.__file__)", cwd=folder)
    assert Path(where.strip()).is_relative_to(packages)


@pytest.fixture
def bash(installed, tmp_path):
    """Run shell commands in an empty folder with the installed package and these variables; return their output."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environment.pop("PYTHONPATH", None)
    environment["PATH"] = f"{installed}:{environment['PATH']}"

    def run(*commands: str, **variables: object) -> str:
        told = {**environment, **{name: str(value) for name, value in variables.items()}}
        return call("bash", "-c", " && ".join(commands), cwd=tmp_path, env=told)

    return run
