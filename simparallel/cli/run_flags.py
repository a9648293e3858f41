"""Options of `simparallel run`: its own, torchrun's, msrun's and mpirun's.

Without a node rank one command starts all nodes: simulated ones on this machine, or real ones over MPI. With a node
rank it starts that node alone, like torchrun and msrun, and the ranks of all nodes find each other on this machine.

    alias torchrun="simparallel torchrun"
    alias msrun="simparallel msrun"
    alias mpirun="simparallel run"
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from simparallel.base.argparse_checks import at_least_one, positive
from simparallel.base.system import usable_cores
from simparallel.base.units import format_number_of
from simparallel.cli import flags
from simparallel.clock.recording import RECORD
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.compat import FRONTS
from simparallel.errors import InputError
from simparallel.machine.ranktable import RankTable, load
from simparallel.runtime.environment import MASTER_ADDR, MASTER_PORT
from simparallel.runtime.joined.join import MEET_LIMIT_S
from simparallel.runtime.launcher.pool import START_LIMIT_S
from simparallel.runtime.log_folder import MPIRUN_LINKS, RANK_LINKS

# Launcher -> what differs in it: defaults of its options.
LAUNCHERS: Mapping[str, Mapping[str, object]] = {
    "run": {},
    "torchrun": {"framework": "torch"},
    "msrun": {
        "framework": "mindspore", "default_world_size": 8, "default_log_dir": ".", "log_links": MPIRUN_LINKS,
        "master_port": 8118, "start_timeout": 600.0,
    },
}  # fmt: skip
# python, python3, python3.12.
_PYTHON = re.compile(r"python[\d.]*")
TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Request:
    """The ranks, nodes and files that the command line asks for.

    Attributes:
        world_size: number of ranks.
        nodes: number of nodes.
        rank_table: the rank table that gives both, or None.
        environment: variables for every rank.
        node: the node that this command starts; None for all.
        log_dir, log_links: see `runtime.logs.LogFiles`.
        echo: whether the output of ranks is printed, or the ranks whose output is.
        start_timeout_s: seconds that the ranks may take to start.
        notes: notes on options whose effect may surprise the user.
    """

    world_size: int
    nodes: int
    rank_table: RankTable | None
    environment: Mapping[str, str]
    node: int | None
    log_dir: Path
    log_links: str
    echo: bool | tuple[int, ...]
    start_timeout_s: float
    notes: tuple[str, ...]


def add_arguments(command: argparse.ArgumentParser, launcher: str = "run") -> None:
    """Add the options of one of `LAUNCHERS`, and the script."""
    usual = {"default_world_size": None, "default_log_dir": None, "log_links": RANK_LINKS}
    command.set_defaults(**{**usual, **LAUNCHERS[launcher]})
    # msrun spells options with underscores, torchrun with either.
    add = partial(flags.add, command, underscores=True)
    add("world_size", "-np", "--worker-num", help="number of ranks, on all nodes (default 1; msrun: 8)")
    add("nodes", "--nnodes", type=_nodes, help="on how many nodes they are (default 1)")
    add(
        "--nproc-per-node",
        "--local-worker-num",
        type=_per_node,
        metavar="N",
        dest="per_node",
        help="ranks on each node; auto or cpu: one for each core",
    )
    add("devices_per_rank")
    add("cluster")
    add("dtype")
    add("--standalone", action="store_true", help="torchrun's; every run here stands alone")
    add(
        "--node-rank",
        type=int,
        metavar="N",
        help="start only this node; a command for each other one joins it on this machine (default: start all)",
    )
    add("--master-addr", metavar="ADDRESS", help=f"MASTER_ADDR of every rank (default {MASTER_ADDR}); nothing listens")
    add(
        "--master-port",
        type=int,
        metavar="PORT",
        help=f"MASTER_PORT of every rank (default {MASTER_PORT}; msrun: 8118); the same for all nodes of a job",
    )
    add("--rank-table", "--rank-table-file", metavar="FILE", help="a rank table: its servers are the nodes")
    add("out", "--log-dir", metavar="DIR", help="folder of logs, trace, pictures (default runs/SCRIPT; msrun: here)")
    add("--output-filename", metavar="DIR", help="the same, with logs as DIR/1/rank.N/stdout too, as mpirun has them")
    add("--worker-log-name", metavar="NAME", help="msrun's: link the logs as NAME_N.log; {ip} and {hostname} are known")
    add("--tail-worker-log", type=shown_ranks, default=True, metavar="N,…", help="print only what these ranks write")
    add("--bind-core", metavar="BOOL", help="msrun's; ranks are not bound to cores, which changes no result")
    add("--sim-level", type=int, choices=range(-1, 4), default=-1, help="msrun's: 0 … 3 predicts the script")
    add("--sim-rank-id", type=int, metavar="N", help="msrun's, for --sim-level; the prediction is for every rank")
    add("--join", type=truth, default=True, metavar="BOOL", help="msrun's; the command waits for its ranks in any case")
    for word in ("--merge-stderr-to-stdout", "--allow-run-as-root", "--oversubscribe"):
        add(word, action="store_true", help="mpirun's; it is so in any case")
    add(
        "--transport",
        choices=("shm", "mpi"),
        default="shm",
        help="shm: processes on this machine (default); mpi: under mpiexec, also on several machines",
    )
    add("--mpiexec", metavar="COMMAND", help='how to call mpiexec, such as "mpiexec -hosts a,b"')
    add("--no-use-env", action="store_true", help="give the script --local_rank=N, as torch.distributed.launch does")
    add(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="how long a rank waits for another one, and is waited for at its end (default %(default)g s)",
    )
    add(
        "--record",
        choices=RECORD,
        default="summary",
        help="of a long run: exact totals and the events of some steps (default), all events, or off",
    )
    add("array", help="library of the ranks' arrays: numpy (default), or cupy for arrays on the GPUs")
    add(
        "--cluster-time-out",
        type=float,
        metavar="S",
        dest="start_timeout",
        help=f"how long the ranks may take to start (default {START_LIMIT_S:g} s), or the other nodes, with "
        f"--node-rank ({MEET_LIMIT_S:g} s); msrun: 600 s",
    )
    command.add_argument(
        "--as",
        dest="framework",
        choices=(*FRONTS, "none"),
        help="in SCRIPT, import mindspore or import torch means simparallel's front (default: msrun mindspore, "
        "torchrun torch, run none)",
    )
    flags.add_script(command, "a Python file; it calls sp.init()")


def _nodes(text: str) -> int:
    # torchrun's form MIN:MAX asks for an elastic job.
    low, colon, _ = text.partition(":")
    if colon:
        raise argparse.ArgumentTypeError(f"{text!r}: the number of nodes is fixed here; give one number, such as {low}")
    return int(text)


def _per_node(text: str) -> int:
    if text == "gpu":
        raise argparse.ArgumentTypeError("'gpu': devices are simulated; give a number, or auto")
    return usable_cores() if text in ("auto", "cpu") else int(text)


def shown_ranks(text: str) -> bool | tuple[int, ...]:
    """Parse "-1" for all ranks, or the numbers of some, as msrun does; numbers without a rank show nothing."""
    numbers = tuple(map(int, text.split(",")))
    return True if -1 in numbers else numbers


def truth(text: str) -> bool:
    """Parse "True", "False", "1" or "0", as msrun does."""
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return TRUTHS[text.lower()]


def request(options: argparse.Namespace) -> Request:
    """Combine the options into a request.

    Raises:
        InputError: options are out of range or contradict each other.
        RankTableError: the rank table breaks a rule.
    """
    positive(timeout=options.timeout, allow_infinity=True)
    at_least_one(devices_per_rank=options.devices_per_rank)
    if options.start_timeout is not None:
        positive(cluster_time_out=options.start_timeout, allow_infinity=True)
    table = None if options.rank_table is None else load(options.rank_table)
    # A chained comparison: none of the three is given.
    if options.world_size is options.nodes is table is None:
        options.world_size = options.default_world_size
    nodes, world_size = _numbers(options.world_size, options.nodes, options.per_node, table)
    notes = list(table.warnings) if table is not None else []
    node = _node(options, nodes)
    if node is not None and options.transport == "mpi":
        notes.append(f"over MPI this command starts all {nodes} nodes")
        node = None
    if options.transport == "mpi" and options.tail_worker_log is not True:
        notes.append("--tail-worker-log: over MPI the output of all ranks is printed")
    if options.bind_core not in (None, "False", "false", "0"):
        notes.append(f"--bind-core {options.bind_core}: ranks are not bound to cores; this changes no result")
    if not options.join:
        notes.append("--join=False: the command waits for its ranks all the same, so that nothing is left behind")
    if options.mpiexec is not None and options.transport != "mpi":
        raise InputError(f"--mpiexec {options.mpiexec!r} needs --transport mpi.")
    try:
        # Only for its error: quotes that do not close are refused now and not when the job starts.
        shlex.split(options.mpiexec or "")
    except ValueError as error:
        raise InputError(f"--mpiexec {options.mpiexec!r} is not a command line: {error}.") from None
    if options.out and options.output_filename and options.out != options.output_filename:
        raise InputError(f"--out {options.out} and --output-filename {options.output_filename}: give only one.")
    # mpirun's option names a folder, too; without either, the script's name separates the runs.
    usual = options.default_log_dir or Path("runs", _name(options))
    directory = options.out or options.output_filename or usual
    links = MPIRUN_LINKS if options.output_filename else _links(options)
    # Nodes that a person starts one after another need more time than processes that this command starts.
    limit_s = options.start_timeout or (START_LIMIT_S if node is None else MEET_LIMIT_S)
    echo = options.tail_worker_log
    return Request(
        world_size, nodes, table, _masters(options), node, Path(directory), links, echo, limit_s, tuple(notes)
    )


def _links(options: argparse.Namespace) -> str:
    """Return the pattern of the links to the ranks' logs."""
    name = options.worker_log_name
    if name is None:
        return str(options.log_links)
    if os.path.basename(name) != name:
        raise InputError(f"--worker-log-name {name}: give a name without a folder; --out names the folder.")
    name = name.replace("{ip}", options.master_addr or MASTER_ADDR).replace("{hostname}", platform.node())
    # The rank is filled in later, by `str.format`.
    return name.replace("{", "{{").replace("}", "}}") + "_{rank}.log"


def _node(options: argparse.Namespace, nodes: int) -> int | None:
    """Return the node that the command starts; None if it starts all."""
    node = options.node_rank
    # -1 is msrun's default; node 0 of one node is the whole job.
    if node in (None, -1) or nodes == 1 and node == 0:
        return None
    if nodes == 1:
        raise InputError(
            f"--node-rank {node}: with one node there is only node 0. Each command has to give the number of nodes: "
            f"--nnodes {max(2, node + 1)}. (A tutorial of PyTorch prints --nnodes=1 for both of its nodes; it means 2.)"
        )
    if not 0 <= node < nodes:
        raise InputError(f"--node-rank {node} must be in 0 … {nodes - 1} with --nnodes {nodes}.")
    # Node 0 may be given: its command then starts the whole job, with a note.
    if node and options.transport == "mpi":
        raise InputError(
            f"--node-rank {node}: over MPI one command starts all {nodes} nodes; name the machines, as in --mpiexec "
            "'mpiexec -hosts A,B', and leave --node-rank out."
        )
    return int(node)


def without_python(options: argparse.Namespace) -> None:
    """Remove a leading `python`, as in commands for mpirun: ranks run in this command's own Python.

    Raises:
        InputError: python has options of its own, or no script to run.
    """
    # Launchers also start pytest, which is no file but a module.
    if options.script == "pytest" and not os.path.exists("pytest"):
        options.module = True
    # A module named after python, as in `-m python`, is meant as such.
    if not _PYTHON.fullmatch(os.path.basename(options.script)) or options.module:
        return
    # Another Python may have other packages: say so, because the user named that one.
    found = shutil.which(options.script)
    if found is not None and not os.path.samefile(found, sys.executable):
        tell([f"ranks run in {sys.executable}, as this command does, not in {found}"])
    rest = list(options.arguments)
    while rest and rest[0] == "-u":
        # Ranks write without buffering anyway.
        del rest[0]
    if rest and rest[0] == "-m":
        options.module = bool(rest.pop(0))
    if not rest or rest[0].startswith("-"):
        what = f"its option {rest[0]} is not known here" if rest else "a script is missing"
        raise InputError(f"{options.script}: {what}. Leave {options.script} out, and name the script.")
    options.script, *options.arguments = rest


def _name(options: argparse.Namespace) -> str:
    return options.script.rpartition(".")[2] if options.module else Path(options.script).stem


def tell(notes: Sequence[str]) -> None:
    """Print notes to standard error, separate from the ranks' output."""
    for note in notes:
        print(f"simparallel: note: {note}", file=sys.stderr)


def _numbers(
    world_size: int | None, nodes: int | None, per_node: int | None, table: RankTable | None
) -> tuple[int, int]:
    """Return (nodes, world size); derive missing numbers from the others."""
    if table is not None:
        counts = f"{table.path} has {table.world_size} devices on {len(table.servers)} servers"
        sizes = {len(server.devices) for server in table.servers}
        if world_size not in (None, table.world_size) or nodes not in (None, len(table.servers)):
            raise InputError(f"{counts}; leave out other numbers of devices and nodes.")
        if per_node is not None and sizes != {per_node}:
            raise InputError(f"{counts}, not {per_node} on each; leave --nproc-per-node out.")
        return len(table.servers), table.world_size
    at_least_one(n=world_size, nodes=nodes, nproc_per_node=per_node)
    if nodes is None:
        # As many nodes as the devices fill; a remainder is refused below.
        nodes = 1 if world_size is None or per_node is None else max(1, world_size // per_node)
    if world_size is None:
        world_size = nodes * (per_node or 1)
    if world_size % nodes or per_node not in (None, world_size // nodes):
        size = "equal size" if per_node is None else f"{per_node} ranks"
        raise InputError(
            f"{world_size} ranks cannot be split into {format_number_of(nodes, 'node')} of {size}; -np must be "
            "--nnodes times --nproc-per-node."
        )
    return nodes, world_size


def _masters(options: argparse.Namespace) -> dict[str, str]:
    given = {"MASTER_ADDR": options.master_addr, "MASTER_PORT": options.master_port}
    if options.master_port is not None and not 0 <= options.master_port < 65536:
        raise InputError(f"--master-port {options.master_port} must be in 0 … 65535.")
    # Only options that were given: the runtime has the defaults.
    return {name: str(value) for name, value in given.items() if value is not None}
