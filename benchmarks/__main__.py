"""`python -m benchmarks`, in a checkout: measures beside peers, in one interleaved run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from simparallel.base.argparse_checks import Parser, at_least_one, exit_code, names, numbers
from simparallel.cli import flags
from simparallel.cli.main import run_command
from simparallel.errors import InputError

# The options of each benchmark: keyword of its `main` -> option. Options that were not given keep its defaults.
BENCHMARKS = {
    "step": {"names": "models"},
    "ddp": {"names": "models", "ranks": "world_size"},
    "zero": {"ranks": "world_size"},
    "collectives": {"ranks": "world_size", "ops": "ops", "sizes": "sizes", "peers": "peers", "out": "picture"},
    "adasum": {"ranks": "world_size", "sizes": "sizes", "peers": "peers"},
    "shard": {},
    "redistribution": {"ranks": "world_size"},
    "predict": {},
    "plan": {},
    "pipeline": {},
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = Parser(prog="python -m benchmarks", description="Measure beside peers, in one interleaved run.")
    command.add_argument(
        # Optional, because `--setup` can be called alone.
        "what",
        choices=BENCHMARKS,
        nargs="?",
        help="step: a training step of each model, beside PyTorch; "
        "ddp: a data-parallel one on several ranks, beside torch DDP; "
        "zero: one with sharded states, beside torch's; "
        "collectives: each of them, beside gloo, Open MPI, MPICH and memcpy; "
        "adasum: beside a sum, and Horovod's algorithm over MPI; "
        "shard: a network cut over 8 devices, beside the same slicing by hand; "
        "redistribution: plans of few bytes beside plans of few waits; "
        "predict: how long predictions take; plan: how long searches take; "
        "pipeline: a step in four stages, beside torch's pipelines",
    )
    command.add_argument(
        "--setup", action="store_true", help="first make the environments of gloo, Open MPI and MPICH (1.3 GB), once"
    )
    command.add_argument("--rounds", type=int, default=7, help="turns of each contender (default %(default)s)")
    flags.add(command, "json", help="print JSON, not tables")
    command.add_argument(
        "--models", type=names, metavar="NAME,…", help="step, ddp: only models whose name contains one of these"
    )
    command.add_argument(
        "--calibrate",
        action="store_true",
        help="step --array cupy: calibrate the GPU for the predictions, even if the stored calibration fits",
    )
    flags.add(command, "array", default=None, help="step: cupy measures on a GPU, beside PyTorch on it")
    command.add_argument(
        "--cluster", metavar="NAME", help="step: print the predictions for described devices, such as dgx-h100"
    )
    command.add_argument("--peers", type=names, metavar="NAME,…", help="setup, collectives, adasum: only these")
    flags.add(
        command,
        "world_size",
        type=numbers,
        metavar="N,…",
        help="numbers of ranks (default of ddp 1,2,4,8, of zero 2,4, of collectives 2,4,8, of adasum 4, of "
        "redistribution 4,8)",
    )
    command.add_argument("--ops", type=names, metavar="NAME,…", help="collectives: only these, e.g. all_reduce")
    command.add_argument(
        "--sizes",
        type=numbers,
        metavar="BYTES,…",
        help="collectives, adasum: sizes of the vector (default: up to 32 MiB, from 4 B; adasum: from 1 MiB)",
    )
    flags.add(
        command, "picture", default="runs/bench/collectives.svg", help="collectives: the figure (default %(default)s)"
    )
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    return run_command(lambda: exit_code(partial(_measure, parser().parse_args(arguments))))


def _measure(options: argparse.Namespace) -> int:
    at_least_one(rounds=options.rounds)
    if options.setup:
        from benchmarks import environments

        # With --json, standard output holds nothing but JSON.
        tell = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
        environments.setup(options.peers, tell)
    if options.what is not None:
        given = {keyword: getattr(options, option) for keyword, option in BENCHMARKS[options.what].items()}
        settings = {"rounds": options.rounds, "as_json": options.json}
        # Only options that were given, so that the defaults are in one place, at each benchmark.
        settings |= {keyword: value for keyword, value in given.items() if value is not None}
        if options.what == "step" and options.cluster:
            from benchmarks.gpu_step import tell_described

            tell_described(options.cluster, options.models)
            return 0
        module = "gpu_step" if (options.what, options.array) == ("step", "cupy") else options.what
        if module == "gpu_step":
            settings["calibrate"] = options.calibrate
        elif options.calibrate:
            raise InputError("--calibrate is for step --array cupy.")
        import_module(f"benchmarks.{module}").main(**settings)
    elif not options.setup:
        *most, last = BENCHMARKS
        raise InputError(f"choose what to measure: {', '.join(most)} or {last}; or --setup.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
