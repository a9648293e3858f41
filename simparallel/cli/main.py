"""The `simparallel` command: demo, run (also as torchrun and msrun), predict, plan, trace, cluster, …"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import simparallel as sp
from simparallel.base.argparse_checks import Parser, at_least_one, exit_code
from simparallel.base.units import format_number_of
from simparallel.cli import clusters, flags, plan, predict, ranktable as rank_table, run_flags, traces, zoo
from simparallel.errors import RunFailedError
from simparallel.machine.cluster import load_cluster


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = Parser(prog="simparallel", description="Distributed deep-learning training on one laptop.")
    top.add_argument("--version", action="version", version=f"simparallel {sp.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, add_arguments, _) in _COMMANDS.items():
        add_arguments(commands.add_parser(name, help=summary))
    return top


def _add_demo_arguments(command: argparse.ArgumentParser) -> None:
    flags.add(command, "world_size", default=4, help="number of ranks (default %(default)s)")
    flags.add(command, "cluster")
    command.add_argument("--epochs", type=int, default=20, help="default %(default)s")
    flags.add(command, "batch_size", default=120, help="samples in a step, of all ranks together (default %(default)s)")
    flags.add(command, "out", default="runs/demo", metavar="DIR", help="folder for its files (default %(default)s)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script; return the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return run_command(lambda: _code_of(_options(given)))


def run_command(command: Callable[[], int]) -> int:
    """Run a command, flush its output, and return its exit code; the reader of the output, as `head`, may end first."""
    # Pipes of Windows have the characters of its language, and µ may not be among them.
    with suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = command()
        if sys.stdout is not None:
            # Flush here, where a failure can still be handled.
            sys.stdout.flush()
        return code
    except SystemExit:
        # argparse has printed its help.
        if sys.stdout is not None and _reader_is_gone():
            _drop_output()
        raise
    except BrokenPipeError:
        if hasattr(select, "poll") and not _reader_is_gone():
            raise
        _drop_output()
        # Shells give this code, 128 + SIGPIPE, to a program that the signal has ended.
        return 141


def _options(given: list[str]) -> argparse.Namespace:
    """Parse the command line; exit after help and after a usage error."""
    options = parser().parse_args(given)
    if options.command in run_flags.LAUNCHERS:
        options.arguments = _passed_on(given, options)
    return options


def _drop_output() -> None:
    """Discard the output that is still buffered."""
    # Python flushes standard output once more at its exit, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _passed_on(given: list[str], options: argparse.Namespace) -> list[str]:
    """Return the arguments of the script, with the leading "--" that argparse has removed."""
    rest = len(given) - len(options.arguments)
    # argparse removes a "--" only directly after the script.
    own = given[rest - 2 : rest] == [options.script, "--"]
    return ["--", *options.arguments] if own else options.arguments


def _reader_is_gone() -> bool:
    """Return whether the program that reads our output has ended, as `head` does; Windows cannot tell."""
    if not hasattr(select, "poll"):
        return False
    watch = select.poll()
    try:
        # poll reports errors and hang-ups without being asked for them.
        watch.register(sys.stdout.fileno(), 0)
    except OSError:
        # Standard output has been replaced by an object without a descriptor.
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0))


def _code_of(options: argparse.Namespace) -> int:
    """Run a command and print its errors; return the exit code."""
    return exit_code(partial(_COMMANDS[options.command][2], options))


def _demo(options: argparse.Namespace) -> None:
    from simparallel.cli import demo

    at_least_one(n=options.world_size, epochs=options.epochs, batch_size=options.batch_size)
    demo.main(options.world_size, options.epochs, options.batch_size, options.cluster, options.out)


def _run(options: argparse.Namespace) -> int | None:
    from simparallel.cli import run_folder
    from simparallel.runtime.preflight import check_not_in_a_rank
    from simparallel.runtime.ranks.script import check_script

    # Everything that can be refused is refused here, before a process starts.
    check_not_in_a_rank()
    run_flags.without_python(options)
    check_script(options.script, options.module)
    if options.cluster is not None:
        load_cluster(options.cluster)
    request = run_flags.request(options)
    run_flags.tell(request.notes)
    if options.sim_level >= 0:
        return _code_of(_options(_prediction(options, request)))
    started = time.perf_counter()
    with _job(options, request) as (job, run, directory):
        try:
            results = run(*_program(options))
        except RunFailedError:
            # The trace shows the events before the failure. Failing to write it must not hide the run's error.
            with suppress(OSError):
                run_folder.write_trace(directory, job.trace)
            raise
        written = run_folder.write_trace(directory, job.trace)
    # Only runs that log a loss have a curve.
    losses = run_folder.mean_over_ranks(results.metrics, "loss")
    written += run_folder.write_losses(directory, {format_number_of(request.world_size, "device"): losses})
    numbers = {"wall_time_s": time.perf_counter() - started, "script": options.script}
    written.append(run_folder.write_metrics(directory, results.trace, results.metrics, numbers))
    # Ranks that are threads have no logs.
    if (directory / "scheduler.log").exists():
        written += [directory / "scheduler.log", directory / "worker_N.log"]
    print(f"\n{results.trace.table()}\n\nwritten: {', '.join(map(str, written))}")
    return None


def _program(options: argparse.Namespace) -> tuple[str, list[str], bool, bool]:
    """Return the arguments of `run_script` for every rank; with `--as`, `simparallel.compat` runs the script."""
    if options.framework in (None, "none"):
        return options.script, options.arguments, options.no_use_env, options.module
    settings = [*["--no-use-env"] * options.no_use_env, *["-m"] * options.module]
    # `simparallel.compat` is a module that runs the script in turn, so the launcher needs no other way to start ranks.
    return ("simparallel.compat", [options.framework, *settings, options.script, *options.arguments], False, True)


def _prediction(options: argparse.Namespace, request: run_flags.Request) -> list[str]:
    """Return the command that predicts the script: MindSpore's simulated runs compute nothing, too."""
    script, arguments, _, is_module = _program(options)
    words = ["predict", "-n", str(request.world_size), *["-m"] * is_module]
    given = {
        "--nodes": request.nodes, "--cluster": options.cluster, "--dtype": options.dtype,
        "--devices-per-rank": options.devices_per_rank,
    }  # fmt: skip
    words += [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [*words, script, *arguments]


@contextmanager
def _job(options: argparse.Namespace, request: run_flags.Request) -> Iterator[tuple[Any, Callable[..., Any], Path]]:
    """Yield (job, its method that runs the script, the directory of its files)."""
    from simparallel.cli import run_folder

    settings: dict[str, Any] = {
        "device": options.cluster, "devices_per_rank": options.devices_per_rank, "dtype": options.dtype,
        "nodes": request.nodes,
        "rank_table": request.rank_table, "environment": request.environment, "log_dir": request.log_dir,
        "log_links": request.log_links, "log_files": run_folder.FILES, "timeout_s": options.timeout,
        "record": options.record, "array": options.array,
    }  # fmt: skip
    if options.transport == "mpi":
        from simparallel.runtime.mpi.launcher import MpiJob

        job = MpiJob(request.world_size, mpiexec=options.mpiexec, **settings)
        yield job, job.run, job.directory
        return
    settings |= {"start_timeout_s": request.start_timeout_s, "echo": request.echo}
    if request.node is not None:
        from simparallel.runtime.nodes.launcher import NodeJob

        node = NodeJob(request.world_size, request.node, **settings)
        yield node, node.run, node.directory
        return
    from simparallel.runtime.ranks.shutdown import run_program

    with sp.Cluster(request.world_size, **settings) as cluster:
        yield cluster, lambda *program: cluster.run(run_program, *program), request.log_dir


def _doctor(options: argparse.Namespace) -> int:
    from simparallel.cli import doctor

    return doctor.main()


# Name -> (its line in the help, a function that adds its arguments, a function that runs it).
_COMMANDS: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], Any]]] = {
    "demo": ("train on real digits on four device processes, and compare with one", _add_demo_arguments, _demo),
    "run": ("run a script on several device processes", run_flags.add_arguments, _run),
    "torchrun": ("run, as PyTorch's launcher", partial(run_flags.add_arguments, launcher="torchrun"), _run),
    "msrun": ("run, as MindSpore's launcher", partial(run_flags.add_arguments, launcher="msrun"), _run),
    "predict": ("predict a script on a described cluster", predict.add_arguments, predict.main),
    "plan": ("search for the fastest way to cut a training step", plan.add_arguments, plan.main),
    "trace": ("view, summarise, export or compare traces of runs", traces.add_arguments, traces.main),
    "rank-table": ("check, convert, merge or make a rank table", rank_table.add_arguments, rank_table.main),
    "cluster": ("show described hardware, and where its numbers are from", clusters.add_arguments, clusters.main),
    "expected-busbw": ("print what a collective should reach on a cluster", clusters.add_busbw, clusters.busbw),
    "calibrate": ("measure this machine, for predictions of runs on it", clusters.add_calibrate, clusters.calibrate),
    "zoo": ("list wrong programs to learn from, or show one and run it", zoo.add_arguments, zoo.main),
    "doctor": ("show the features of this machine, and the fallbacks for missing ones", lambda command: None, _doctor),
}
