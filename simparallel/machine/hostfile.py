"""Host files of mpirun and DeepSpeed: a line for each host, with the number of its ranks."""

from __future__ import annotations

import os

from simparallel.errors import ClusterError
from simparallel.machine.links import Groups
from simparallel.machine.ranktable.jsontext import read_file
from simparallel.machine.spec import MAX_RANKS


def read_host_file(path: str | os.PathLike[str]) -> Groups:
    """Return the ranks of each host, numbered in the order of the lines.

    A host has one rank unless "slots=8" or ":8" sets another number; a host that is named again gets further ranks.
    From # on, a line is a comment.

    Raises:
        ClusterError: the file cannot be read, or a line is not of this form. Facts: `path`, `line`.
    """
    name = os.fspath(path)
    data = read_file(name)
    ranks: dict[str, list[int]] = {}
    total = 0
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # An IPv6 address has several colons.
        host, _, after = words[0].partition(":") if words[0].count(":") == 1 else (words[0], "", "")
        options = dict(word.partition("=")[::2] for word in words[1:])
        slots = options.get("slots", after or "1")
        count = int(slots) if slots.isascii() and slots.isdecimal() and len(slots) < 10 else 0
        if not host or "" in options.values() or not 1 <= count <= MAX_RANKS - total:
            raise ClusterError(
                f"{name}:{number}: {ascii(line.strip()[:60])} is not a host with 1 or more ranks, of at most "
                f'{MAX_RANKS} in all; write lines such as "node1 slots=8".',
                path=name,
                line=number,
            )
        ranks.setdefault(host, []).extend(range(total, total + count))
        total += count
    if not ranks:
        raise ClusterError(f'{name}: names no host; write lines such as "node1 slots=8".', path=name, line=None)
    return tuple(map(tuple, ranks.values()))
