"""The command `simparallel plan`: automatic parallelism for a model or a script, without running it for real."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from simparallel.base.argparse_checks import at_least_one, flag
from simparallel.base.names import did_you_mean
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_seconds
from simparallel.cli import flags, plan_config
from simparallel.clock.memory import parse_bytes
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec, load_cluster
from simparallel.runtime.ranks.labels import labelled_output

if TYPE_CHECKING:
    from simparallel.search.plan import Plan


def add_arguments(command: argparse.ArgumentParser) -> None:
    flags.add(command, "cluster", required=True, help=flags.HARDWARE)
    flags.add(command, "world_size")
    flags.add(command, "device_memory")
    flags.add(command, "batch_size", help="a model: samples in a step, of all ranks together (default: 32 for each)")
    command.add_argument("--method", metavar="NAME", help="a model: how to search (default auto: the exact search)")
    command.add_argument(
        "--front", action="store_true", help="a model: the plans of which none is as good as another in time and memory"
    )
    command.add_argument("--all-ops", action="store_true", help="print every op, not one for all with its strategy")
    flags.add(command, "out", help="write the plan as JSON, for AutoParallel(..., plan=FILE)")
    flags.add(command, "picture", help="draw the plan: .svg, .png or .pdf")
    command.add_argument(
        "--explain", metavar="OP", action="append", default=[], help="say why a call has its strategy; repeatable"
    )
    flags.add(command, "json")
    plan_config.add_arguments(command)
    command.add_argument(
        "what", nargs="?", metavar="MODEL|SCRIPT", help="a model of simparallel.models, or a Python file"
    )
    # Unlike in `predict`, not the whole rest of the line: options may follow the model.
    command.add_argument("arguments", nargs="*", help="passed on to the script; its options after SCRIPT --")


def main(options: argparse.Namespace) -> None:
    """Make the plan of a model, or the plans of a script or a config, and print or write the requested output.

    Raises:
        InputError: neither a model nor a script nor a config, or an option that does not go with it.
        ClusterError: the cluster cannot be described.
        SearchError: no plan fits into the memory.
        RunFailedError: the script failed.
    """
    from simparallel.search.model_steps import MODELS

    at_least_one(n=options.world_size, batch_size=options.batch_size)
    cluster = load_cluster(options.cluster, options.world_size)
    if options.device_memory is not None:
        # A plan may use the memory of the described device, so describe one that has this much.
        device = replace(cluster.device, memory_bytes=parse_bytes(options.device_memory, "--device-memory"))
        cluster = replace(cluster, device=device)
    if options.config is not None:
        with _progress() as progress:
            plan_config.main(options, cluster, progress)
        return
    if options.what is None:
        raise InputError("plan: name a model of simparallel.models or a script, or pass --config.")
    plans = _of_model(options, cluster) if options.what in MODELS else _of_script(options, cluster)
    if options.json:
        dicts = [plan.to_dict() for plan in plans]
        print(json.dumps(dicts if len(dicts) > 1 else dicts[0], indent=1))
    if options.front and not options.json:
        print(_front(plans))
    for number, plan in enumerate(plans, 1):
        _tell(plan, number, options)


def _of_model(options: argparse.Namespace, cluster: ClusterSpec) -> list[Plan]:
    from simparallel.search.model_steps import MODELS, ModelStep
    from simparallel.search.planner import SearchSettings, pareto_plans, plan_graph

    if options.arguments:
        raise InputError(
            f"plan: {options.what} is a model and takes no arguments; remove {' '.join(options.arguments)}."
        )
    known = MODELS[options.what]
    batch = options.batch_size or known.batch * cluster.world_size
    step = ModelStep(known)
    settings = SearchSettings(method=options.method or "auto", memory_limit_bytes=cluster.device.memory_bytes)
    graph, *split = step.graphs(batch, cluster.world_size)
    with _progress() as progress:
        if options.front:
            plans = pareto_plans(graph, cluster, settings, progress, split)
        else:
            plans = [plan_graph(graph, cluster, settings, progress, split)]
    if not options.json:
        step_text = f"{options.what}: a training step on {batch} samples of shape {known.sample}"
        print(f"{step_text}, cross-entropy, {type(step.optimizer).__name__}")
    return plans


def _of_script(options: argparse.Namespace, cluster: ClusterSpec) -> list[Plan]:
    from simparallel.predict.dry_run import dry_run
    from simparallel.runtime.ranks.script import check_script, run_script
    from simparallel.search.model_steps import MODELS
    from simparallel.search.planner import watch_searches

    if not options.what.endswith(".py") and not Path(options.what).exists():
        raise InputError(
            f"plan: {options.what} is neither a model ({', '.join(MODELS)}) nor a script."
            + did_you_mean(options.what, MODELS)
        )
    for name in ("batch_size", "method", "front"):
        if getattr(options, name):
            raise InputError(f"plan: {flag(name)} is an option for models; a script passes it to AutoParallel.")
    check_script(options.what)
    program = partial(run_script, options.what, options.arguments)
    # Standard output is for the plans alone.
    with labelled_output(sys.stderr, repeats=True), _progress() as progress, watch_searches(progress) as found:
        dry_run(program, world_size=cluster.world_size, cluster=cluster)
    if not found:
        raise InputError(
            f'plan: {options.what} made no search; it has to call sp.AutoParallel(step, parallel_mode="auto").'
        )
    return found


@contextmanager
def _progress() -> Iterator[Callable[[float], None] | None]:
    """Yield a function that shows the finished part of the search on one line of a terminal; None without one."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=100, desc="searching", bar_format="{desc}: {n:.0f} %", leave=False) as bar:
        yield lambda part: bar.update(part * 100 - bar.n)


def _front(plans: list[Plan]) -> str:
    """Return a table of plans: memory, time, and how memory is saved."""
    rows = [("plan", "memory", "step", "micro-batches", "recomputed parts")]
    for number, plan in enumerate(plans, 1):
        memory, step = format_bytes(plan.memory_bytes or 0), format_seconds(plan.step_time_s or 0.0)
        rows.append((str(number), memory, step, str(plan.num_micro_batches), str(len(plan.recomputed))))
    return "\n".join(aligned(rows, ">"))


def _tell(plan: Plan, number: int, options: argparse.Namespace) -> None:
    """Print a plan, and write its files."""
    from simparallel.cli import run_folder

    if not options.json and not options.front:
        print(plan if options.all_ops else plan.table())
    if not options.json:
        for name in options.explain:
            print(plan.explain(name))
    tell = partial(print, file=sys.stderr if options.json else sys.stdout)
    if options.out:
        path = _numbered(options.out, number)
        plan.save(path)
        tell(f'written: {path}; to execute it: AutoParallel(step, "auto", plan="{path}")')
    if options.picture:
        from simparallel.view.plan import plot_plan

        rows = [(planned.name, planned.in_strategy) for planned in plan.ops]
        picture = Path(_numbered(options.picture, number))
        run_folder.save_and_close(plot_plan(rows, title=plan.title), picture)
        tell(f"written: {picture}")


def _numbered(name: str, number: int) -> str:
    """Return the file of one plan of several: plan.json, plan-2.json, …"""
    path = Path(name)
    return name if number == 1 else str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
