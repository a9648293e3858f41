"""The identity of a process that was started on its own: its rank, read from the variables of several launchers.

    torch's       RANK, WORLD_SIZE, and LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT
    MindSpore's   RANK_TABLE_FILE with RANK_ID, or with DEVICE_ID (and SERVER_ID, if there are several servers);
                  RANK_ID and RANK_SIZE without a table
    others        see `launchers`; one of them may start the daemons or the agents of another one, once on each node

Ranks of one job have the same port, table and job ids: `RankIdentity.key` is a hash of these.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simparallel.errors import LaunchError
from simparallel.machine.ranktable import RankTable, format_rank_table, load
from simparallel.runtime.environment import MASTER_ADDR, MASTER_PORT, mark_of
from simparallel.world.launchers import LAUNCHERS, SLURM, TORCHRUN, LauncherNames, launcher_variables
from simparallel.world.rank import CHILD_VARIABLE

# Launchers and schedulers set a different value for each job. torchrun keeps its run id when it restarts the ranks,
# so the restart count is part of the job, too.
JOB_VARIABLES = ("SIMPARALLEL_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
# Published examples use these: addresses for documentation (RFC 5737, RFC 3849), and the unspecified address.
_PLACEHOLDERS = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "0.0.0.0/32")
_TEXTS = ("RANK_TABLE_FILE", "MASTER_ADDR")


@dataclass(frozen=True)
class RankIdentity:
    """One rank of a job, as its environment describes it.

    Attributes:
        rank, world_size: the rank, and the number of ranks, 0 if only MPI knows it.
        node: label of its node; ranks with the same label are on the same (simulated) machine.
        device_id: number of its device; None if neither the environment nor a table contains it.
        port: MASTER_PORT.
        table: the rank table, or None.
        job: ids that distinguish jobs with equal ports and tables.
        given: the variables that were read.
        command: command line that starts a node's ranks, with "{node}" for its number; "" without a launcher.
        notes: irregularities that were tolerated, for the user.
        source: the variables that this was read from, for the user.
        is_mpi: whether a launcher started the ranks that MPI can connect.
        is_here: False if the variables say that some ranks are on other machines.
    """

    rank: int
    world_size: int
    node: int
    device_id: int | None
    port: int
    table: RankTable | None = None
    job: tuple[str, ...] = ()
    given: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    command: str = ""
    source: str = "RANK_TABLE_FILE"
    is_mpi: bool = False
    is_here: bool = True

    @property
    def key(self) -> str:
        """Hash that is equal for the ranks of one job."""
        # The table's contents, not its path: each rank may read a copy of its own. The hash serves as a file name.
        table = "" if self.table is None else format_rank_table(self.table)
        text = json.dumps([self.port, table, self.job])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def where(self) -> str:
        """Return the job as text, for messages."""
        table = f"{self.table.path}, " if self.table else ""
        return f"{table}port {self.port}" + "".join(f", job {name}" for name in self.job)

    def command_of(self, rank: int) -> str:
        """Return the command line that starts another rank in the same way as this one."""
        if self.command:
            return self.command.replace("{node}", str(self._node_of(rank)))
        local_rank = self._local_rank_of(rank)
        values = {**self.given, "DEVICE_ID": local_rank}
        for launcher in LAUNCHERS:
            values |= {**dict.fromkeys(launcher.rank, rank), **dict.fromkeys(launcher.local_rank, local_rank)}
        names = [name for name in self.given if name not in JOB_VARIABLES]
        if self.table is not None:
            values |= {"DEVICE_ID": self.table.device_ids[rank], "SERVER_ID": self._node_of(rank)}
        else:
            # The node of that rank is unknown.
            names = [name for name in names if name not in TORCHRUN.node + SLURM.node]
        # `orig_argv` has the interpreter's options, too; an embedded Python leaves it empty.
        program = sys.orig_argv or ["python", *sys.argv]
        command = shlex.join([os.path.basename(program[0]), *program[1:]])
        return " ".join([*(f"{name}={shlex.quote(str(values[name]))}" for name in names), command])

    def _node_of(self, rank: int) -> int:
        if self.table is None:
            return rank // self.per_node
        return next(i for i, ranks in enumerate(self.table.nodes) if rank in ranks)

    def _local_rank_of(self, rank: int) -> int:
        return rank % self.per_node

    @property
    def per_node(self) -> int:
        """Number of ranks on each node, assuming equally many."""
        size = self.given.get("LOCAL_WORLD_SIZE") or self.given.get("DEVICE_NUM") or str(self.world_size)
        return max(1, int(size))


def identify(environment: Mapping[str, str]) -> RankIdentity:
    """Return the identity that the variables describe.

    Raises:
        LaunchError: a variable is missing or wrong, two contradict each other, ranks are on other machines, or this
            process has inherited the variables of a rank that started it.
        RankTableError: the rank table breaks a rule.
    """
    own = launcher_variables(environment)
    names = (*_TEXTS, "DEVICE_ID", "DEVICE_NUM", "MASTER_PORT", *JOB_VARIABLES)
    # An empty variable counts as unset.
    given = {**{name: environment[name] for name in names if environment.get(name)}, **own}
    _check_not_a_child(environment, given)
    numbers = {name: _number(name, text) for name, text in given.items() if name not in (*_TEXTS, *JOB_VARIABLES)}
    port = numbers.get("MASTER_PORT", MASTER_PORT)
    job = tuple(given[name] for name in JOB_VARIABLES if name in given)
    # A table states all ranks and their servers, so it takes precedence.
    is_placed = numbers.keys() & {*TORCHRUN.rank, "DEVICE_ID"} or not own
    if "RANK_TABLE_FILE" in given and is_placed:
        check_address(given.get("MASTER_ADDR", MASTER_ADDR))
        path, notes = _found(given["RANK_TABLE_FILE"])
        table = load(path)
        check_servers(table)
        place, node = _place_in(table, numbers)
        return RankIdentity(
            place, table.world_size, node, table.device_ids[place], port, table, job, given, (*notes, *table.warnings)
        )
    claims = _agreed([_claim_of(one, numbers) for one in LAUNCHERS if given.keys() & {*one.rank, *one.size}])
    first = claims[0]
    is_mpi = any(one.launcher.is_mpi for one in claims)
    if not is_mpi:
        check_address(given.get("MASTER_ADDR", MASTER_ADDR))
    job += tuple(environment[name] for name in first.launcher.job if environment.get(name))
    node = _node(numbers, first.rank) if first.launcher is TORCHRUN else 0
    return RankIdentity(
        first.rank, first.size, node, numbers.get("DEVICE_ID"), port, None, job, given, source=str(first),
        is_mpi=is_mpi, is_here=all(one.is_here for one in claims),
    )  # fmt: skip


class _LauncherClaim(NamedTuple):
    """What the variables of one launcher say; a size of 0 is not known.

    Attributes:
        is_here: whether all ranks may be on this machine.
        is_one_per_node: whether the processes may be the daemons or the agents of another launcher.
    """

    launcher: LauncherNames
    rank_name: str
    rank: int
    size_name: str
    size: int
    is_here: bool
    is_one_per_node: bool

    def __str__(self) -> str:
        name = "MindSpore" if self.rank_name == "RANK_ID" else self.launcher.name
        return f"{' and '.join(filter(None, (self.rank_name, self.size_name)))} ({name})"


def _claim_of(launcher: LauncherNames, numbers: Mapping[str, int]) -> _LauncherClaim:
    """Return what the variables of a launcher say.

    Raises:
        LaunchError: one is missing, or contradicts another one.
    """
    rank, size = _same(numbers, launcher.rank), _same(numbers, launcher.size)
    if (rank[1] is None and size[1] != 1) or (size[1] is None and launcher.size):
        name, number = size if rank[1] is None else rank
        pairs = dict(zip(launcher.rank + launcher.size, launcher.size + launcher.rank, strict=True))
        missing = pairs[name]
        raise LaunchError(
            f"init: {name}={number} says that this process is one of several, but {missing} is not set. Set {missing}, "
            f"unset {name} to run this process alone, or start all with one command: simparallel run -n N SCRIPT"
        )
    local, node = _same(numbers, launcher.local_rank), _same(numbers, launcher.node[:1])
    per_node, nodes = _same(numbers, launcher.local_size), _same(numbers, launcher.nodes)
    for (name, number), (limit_name, limit), below in (
        (rank, size, 1), (local, per_node, 1), (node, nodes, 1), (per_node, size, 0),
    ):  # fmt: skip
        if number is not None and limit is not None and number > limit - below:
            raise LaunchError(f"init: {name}={number}, but {limit_name}={limit}: {name} is at most {limit - below}.")
    is_here = nodes[1] in (None, 1) and per_node[1] in (None, size[1])
    is_one_per_node = size[1] == 1 or per_node[1] == 1 or nodes[1] == size[1]
    return _LauncherClaim(launcher, rank[0], rank[1] or 0, size[0], size[1] or 0, is_here, is_one_per_node)


def _agreed(claims: list[_LauncherClaim]) -> list[_LauncherClaim]:
    """Return the claims of the launchers that started the ranks themselves, that with precedence first.

    Raises:
        LaunchError: two of them contradict each other.
    """
    largest = max(one.size for one in claims)
    # mpirun starts a daemon on each node through srun, and a job may have an agent of torchrun on each: ranks inherit
    # the variables that these were given.
    first, *rest = [one for one in claims if not (one.is_one_per_node and one.size < largest)]
    found = [first]
    for other in rest:
        if (other.rank, other.size) == (first.rank, first.size):
            found.append(other)
        elif other.size and not other.is_one_per_node:
            differ = "size" if other.size != first.size else "rank"
            names = [f"{getattr(one, f'{differ}_name')}={getattr(one, differ)}" for one in (first, other)]
            raise LaunchError(
                f"init: {' and '.join(names)} contradict each other. Start the ranks by one launcher, or unset the "
                "variables of the other one."
            )
    return found


def _number(name: str, text: str) -> int:
    # Nine digits hold any rank or port, and bound the cost of `int`.
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise LaunchError(f"init: {name}={text!r} is not a number of 0 or more.")
    return int(text)


def _same(numbers: Mapping[str, int], names: Sequence[str]) -> tuple[str, int | None]:
    """Return the first of some synonyms that is set, and its value; ("", None) if none is set."""
    found = {name: numbers[name] for name in names if name in numbers}
    if len(set(found.values())) > 1:
        pairs = " and ".join(f"{name}={number}" for name, number in found.items())
        raise LaunchError(f"init: {pairs} contradict each other; unset one of them.")
    return next(iter(found.items()), ("", None))


def _node(numbers: Mapping[str, int], rank: int) -> int:
    for name in TORCHRUN.node:
        if name in numbers:
            return numbers[name]
    # The ranks of a node need the same label. Assuming that they are consecutive, take the first one.
    if "LOCAL_RANK" in numbers:
        return rank - numbers["LOCAL_RANK"]
    return rank // max(1, numbers["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in numbers else 0


def _found(path: str) -> tuple[str, tuple[str, ...]]:
    """Return (path of the table, notes).

    Scripts that start each rank in a folder of its own may give the path relative to the parent folder.
    """
    above = os.path.join(os.pardir, path)
    if os.path.isabs(path) or os.path.exists(path) or not os.path.exists(above):
        return path, ()
    return above, (f"RANK_TABLE_FILE={path} is not in {os.getcwd()}; taken from the folder above",)


def _place_in(table: RankTable, numbers: Mapping[str, int]) -> tuple[int, int]:
    """Return (rank, number of its server)."""
    _, size = _same(numbers, TORCHRUN.size)
    if size not in (None, table.world_size):
        raise LaunchError(f"init: {table.path} has {table.world_size} devices, but WORLD_SIZE or RANK_SIZE is {size}.")
    servers = list(enumerate(table.servers))
    if "SERVER_ID" in numbers:
        servers = servers[numbers["SERVER_ID"] :][:1]
        if not servers:
            raise LaunchError(
                f"init: SERVER_ID={numbers['SERVER_ID']}, but {table.path} has {len(table.servers)} servers, "
                f"0 … {len(table.servers) - 1}."
            )
    (_, rank), device_id = _same(numbers, TORCHRUN.rank), numbers.get("DEVICE_ID")
    given = ", ".join(
        f"{name}={numbers[name]}" for name in ("RANK", "RANK_ID", "DEVICE_ID", "SERVER_ID") if name in numbers
    )
    if rank is None and device_id is None:
        raise LaunchError(
            f"init: {table.path} has {table.world_size} devices, and this process cannot tell which one is its own: "
            "set RANK_ID or DEVICE_ID."
        )
    # All devices that agree with every variable that is set: exactly one must remain.
    places = [
        (device.rank_id, number)
        for number, server in servers
        for device in server.devices
        if rank in (None, device.rank_id) and device_id in (None, device.device_id)
    ]
    if not places:
        raise LaunchError(f"init: {table.path} has no device with {given}. {table.describe().partition(': ')[2]}")
    if len(places) > 1:
        ranks = ", ".join(str(rank) for rank, _ in places)
        raise LaunchError(
            f"init: {given} may be rank {ranks} of {table.path}, which has {len(table.servers)} servers: set RANK_ID, "
            "or SERVER_ID, the number of the server."
        )
    return places[0]


# --- machines --------------------------------------------------------------------------------------------


_OVER_MPI = (
    "Processes on several machines meet over MPI: simparallel run --transport mpi -n N --mpiexec 'mpiexec -hosts A,B' "
    "SCRIPT, or mpiexec -n N python SCRIPT."
)


def check_address(address: str) -> None:
    if not is_here(address):
        raise LaunchError(
            f"init: MASTER_ADDR={address} is not an address of this machine. {_OVER_MPI} To simulate all nodes on this "
            f"one, set MASTER_ADDR={MASTER_ADDR}."
        )


def check_servers(table: RankTable) -> None:
    """Check that all servers of the table are this machine; placeholders for addresses pass.

    Raises:
        LaunchError: a server has the address of another machine.
    """
    away = [server.server_id for server in table.servers if not _may_be_here(server.server_id)]
    if away:
        here = ", ".join(f"127.0.0.{number + 1}" for number in range(len(table.servers)))
        raise LaunchError(
            f"init: {table.path} has server {away[0]}, which is not this machine. {_OVER_MPI} To simulate its "
            f"servers on this one, give them addresses of it, such as {here}."
        )


def _may_be_here(server_id: str) -> bool:
    """Return whether a server id is an address here or a placeholder (masked, a documentation address, a name)."""
    try:
        address = ipaddress.ip_address(server_id)
    except ValueError:
        return True
    blocks = map(ipaddress.ip_network, _PLACEHOLDERS)
    return any(address in block for block in blocks) or is_here(server_id)


def is_here(address: str) -> bool:
    """Return whether this is an address or a name of this machine: whether a socket can be bound to it.

    The socket never listens.
    """
    if address in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_be_bound(family, where) for family, _, _, _, where in found)


def _can_be_bound(family: int, where: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
    except OSError as error:
        # On a machine without networks other errors occur, which prove nothing: accept the address.
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _check_not_a_child(environment: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Refuse a process that a rank has started: it inherits the rank's variables without being the rank."""
    pid, _, mark = environment.get(CHILD_VARIABLE, "").partition(" ")
    if pid.isdecimal() and int(pid) != os.getpid() and mark == mark_of(given):
        names = [name for launcher in LAUNCHERS for name in launcher.rank + launcher.size if name in given]
        raise LaunchError(
            f"init: this process was started by rank {given.get('RANK')} (pid {pid}), whose variables it inherited, "
            f"and is not a rank itself. To run it alone, start it without {', '.join(names)}."
        )
