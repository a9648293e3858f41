"""Fork ranks that join by themselves, each with its own environment, case after case.

Run it in its own process: python joining.py FOLDER WORLD_SIZE CASE...
The last rank acts out the case; rank N writes to FOLDER/CASE.N, and the exit codes are printed as JSON. With a
launcher's name behind the case, as in kill-Slurm, the environment is that of this launcher, and all ranks write to one
file, FOLDER/CASE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback  # noqa: F401 (imported once, and not once in every rank)

import simparallel as sp
from simparallel import data, nn
from simparallel.runtime.joined import join  # noqa: F401

LAUNCHERS = ("torchrun", "MindSpore", "PMI", "Cray", "Slurm", "by hand", "Open MPI")


def variables_of(launcher: str, rank: int, size: int, per_node: int | None = None) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank, with `per_node` ranks on each node (default: all)."""
    per_node = per_node or size
    node, local, nodes = rank // per_node, rank % per_node, -(-size // per_node)
    numbers: dict[str, int | str] = {
        "torchrun": {
            "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node, "GROUP_RANK": node,
        },
        "MindSpore": {"RANK_ID": rank, "RANK_SIZE": size},
        "PMI": {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": per_node},
        "Cray": {"PMI_RANK": rank, "PMI_SIZE": size, "PMI_LOCAL_RANK": local, "PMI_LOCAL_SIZE": per_node},
        # srun in the script of a job of 64 tasks.
        "Slurm": {
            "SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 1, "ENVIRONMENT": "BATCH", "SLURM_NTASKS": 64, "SLURM_NNODES": 16,
            "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NUM_NODES": nodes, "SLURM_PROCID": rank, "SLURM_LOCALID": local,
            "SLURM_NODEID": node,
        },
        "by hand": {"SLURM_PROCID": rank, "SLURM_NTASKS": size},
        "Open MPI": {
            "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_RANK": local,
            "OMPI_COMM_WORLD_LOCAL_SIZE": per_node, "PMIX_RANK": rank, "PMIX_NAMESPACE": "prterun-4711@1",
        },
    }[launcher]  # fmt: skip
    return {name: str(number) for name, number in numbers.items()}


def train() -> list[str]:
    """Train on digits in parallel; return the losses to the last bit."""
    sp.set_seed(1)
    mine = slice(sp.get_rank(), None, sp.get_world_size())
    images, labels = (array[:96][mine] for array in data.digits("train")[:])
    model = sp.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = sp.functions.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
    return losses


def fork_ranks(folder: str, world_size: int, case: str) -> dict[str, object] | None:
    """Fork the ranks; return None in them, in the parent exit codes and the last one's delay after the victim."""
    pids = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _, _, launcher = case.partition("-")
            os.environ |= {"MASTER_PORT": str(os.getppid() % 60000)}
            os.environ |= variables_of(launcher or "torchrun", rank, world_size)
            path = f"{folder}/{case}" if launcher else f"{folder}/{case}.{rank}"
            log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            return None
        pids[pid] = rank
    codes: dict[int, int] = {}
    ended_s: dict[int, float] = {}
    while len(codes) < world_size:
        pid, status = os.wait()
        codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        ended_s[pids[pid]] = time.monotonic()
    late_s = max(ended_s.values()) - ended_s[world_size - 1]
    return {"codes": [codes[rank] for rank in range(world_size)], "late_s": late_s}


def play(case: str) -> None:
    case, _, launcher = case.partition("-")
    if launcher:
        sp.init(start_timeout_s=30, timeout_s=20)
    rank, is_victim = int(os.environ["RANK"]), os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if case == "train":
        os.write(1, f"losses {rank} {json.dumps(train())}\n".encode())
        return
    if case == "before" and is_victim:
        os.kill(os.getpid(), signal.SIGKILL)
    sp.init(start_timeout_s=0.5 if case == "before" else 30, timeout_s=20)
    x = sp.Tensor([float(rank)])
    sp.all_reduce(x)
    print("sum", x.item(), sp.get_rank(), sp.get_world_size(), sp.get_local_rank(), flush=True)
    if case == "good":
        group = sp.new_group([0, sp.get_world_size() - 1])
        if rank in group.ranks:
            sp.broadcast(x, 0, group=group)
        if rank == 0:
            sp.send(x, 1)
        if rank == 1:
            sp.recv(x, 0)
        trace = sp.Trace.of_this_rank()
        print("trace", trace.ranks, [event.name for event in trace.events][0])
        return
    if case == "unreceived":
        if rank == 0:
            sp.send(x, 1)
        return
    if case == "after":
        if is_victim:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return
    if is_victim:
        if case == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "raise":
            raise ZeroDivisionError("on purpose")
        if case == "exit3":
            sys.exit(3)
        if case == "_exit":
            os._exit(5)
        if case in ("loop", "sleep"):
            raise ValueError("others do not wait for it")
        if case == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
    while case == "loop":
        pass
    if case == "sleep":
        time.sleep(60)
    sp.barrier()


if __name__ == "__main__":
    _, folder, size, *cases = sys.argv
    signal.signal(signal.SIGINT, signal.default_int_handler)
    results = {}
    for number, case in enumerate(cases):
        told = fork_ranks(folder, int(size), case)
        if told is None:
            break
        results[f"{case} {number}"] = told
    else:
        print(json.dumps(results))
        os._exit(0)
    play(case)
