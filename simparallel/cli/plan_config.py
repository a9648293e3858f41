"""`simparallel plan --config`: how to train a transformer on a cluster, from its config.json alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from simparallel.base.argparse_checks import at_least_one, flag
from simparallel.base.files import write_atomically
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_number_of, format_seconds
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec
from simparallel.simulate.config import read_config
from simparallel.simulate.prediction import DTYPES, Sharded, TransformerPrediction, with_products

if TYPE_CHECKING:
    from simparallel.search.transformer_check import TransformerCheck

_NOT_HERE = ("method", "front", "all_ops", "picture", "explain", "batch_size", "arguments", "what")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that go with a config."""
    command.add_argument(
        "--config", metavar="FILE|NAME", help="a transformer: its config.json, or a name such as llama-3.1-8b"
    )
    command.add_argument("--global-batch", type=int, metavar="N", help="a config: sequences of a step")
    command.add_argument(
        "--length", type=int, metavar="N", help="a config: tokens of a sequence (default: 4096 at most)"
    )
    command.add_argument(
        "--check", action="store_true", help="a config: dry-run the best plan that the runtime can run"
    )
    command.add_argument("--dtype", choices=DTYPES, help="a config: type of activations (default bfloat16)")


def main(options: argparse.Namespace, cluster: ClusterSpec, progress: Callable[[float], None] | None) -> None:
    """Search the plans of a transformer, and print the best ones.

    Raises:
        InputError: no such model, or an option that does not go with it.
        SearchError: no plan fits into the memory.
    """
    from simparallel.search.transformer_check import check_dtype, check_plan
    from simparallel.search.transformer_plans import transformer_plans
    from simparallel.simulate.program import runnable

    for name in _NOT_HERE:
        if getattr(options, name):
            option = name if name in ("what", "arguments") else flag(name)
            raise InputError(f"plan: {option} cannot be combined with --config; leave it out.")
    batch = 4 * cluster.world_size if options.global_batch is None else options.global_batch
    at_least_one(global_batch=batch, length=options.length)
    shape, dtype = read_config(options.config, options.length), options.dtype or "bfloat16"
    if options.check:
        check_dtype(dtype)
    plans = transformer_plans(shape, cluster, batch, dtype, progress=progress)
    dicts = [_to_dict(plan) for plan in plans]
    if options.out:
        write_atomically(options.out, json.dumps(dicts, indent=1).encode())
    print(json.dumps(dicts, indent=1) if options.json else _text(plans, options.config))
    if options.out and not options.json:
        print(f"written: {options.out}")
    if options.check:
        best = transformer_plans(shape, cluster, batch, dtype, 1, progress, runnable)[0]
        found = check_plan(best.plan, with_products(cluster, dtype), best.schedule)
        print(_compared(best, found), file=sys.stderr if options.json else None)


def _compared(best: TransformerPrediction, found: TransformerCheck) -> str:
    """Return the plan that was run, and how far the closed form is from the dry run."""
    plan = found.plan
    fewer = f", with {plan.num_micro_batches} of {best.plan.num_micro_batches} micro-batches"
    return (
        f"check: the best plan that the runtime can run, tensor {plan.tensor} x data {plan.data} x pipeline "
        f"{plan.pipeline}" + f" x {plan.chunks}" * (plan.chunks > 1) + f", {best.schedule}, micro-batch "
        f"{plan.micro_batch}, recompute {plan.recompute}, sharded {_sharded(best)}: "
        f"{format_seconds(best.step_time_s)} a step\n"
        f"dry run{fewer * (plan.num_micro_batches < best.plan.num_micro_batches)}: {format_seconds(found.dry_s)}, "
        f"{format_bytes(found.dry_bytes)}; closed form: {format_seconds(found.closed_s)} "
        f"({found.closed_s / found.dry_s - 1:+.1%}), {format_bytes(found.closed_bytes)} "
        f"({found.closed_bytes / found.dry_bytes - 1:+.1%})"
    )


def _to_dict(predicted: TransformerPrediction) -> dict[str, Any]:
    """Return a plan by the arguments of `predict_transformer`, and what it predicts."""
    plan = predicted.plan
    return {
        "tensor": plan.tensor, "pipeline": plan.pipeline, "context": plan.context, "expert": plan.expert,
        "data": plan.data, "sharded": _sharded(predicted), "micro_batch": plan.micro_batch,
        "global_batch": plan.global_batch, "length": plan.shape.length, "chunks": plan.chunks,
        "schedule": predicted.schedule, "recompute": plan.recompute, "sequence_parallel": plan.sequence_parallel,
        "dtype": predicted.dtype, "step_time_s": predicted.step_time_s, "mfu": predicted.mfu,
        "memory_bytes": predicted.memory_bytes, "verdict": predicted.verdict, "breakdown": predicted.breakdown,
    }  # fmt: skip


def _sharded(predicted: TransformerPrediction) -> str:
    return str(get_args(Sharded)[predicted.plan.zero_stage])


def _text(plans: list[TransformerPrediction], name: str) -> str:
    """Return a summary, a table of the plans, and what it means."""
    from simparallel.search.transformer_plans import what_if

    best, plan = plans[0], plans[0].plan
    with_experts = any(each.plan.expert > 1 for each in plans)
    many = len(best.cluster.nodes) > 1
    rows = [
        ("", "tensor", "context", "data", "pipeline", *["expert"] * with_experts, "sharded", "micro-batch", "recompute",
         "step", "MFU", "memory", "bound by", "2x GPU", "2x links", *["2x between nodes"] * many)
    ]  # fmt: skip
    for number, each in enumerate(plans, 1):
        own = each.plan
        stages = f"{own.pipeline}" + (f" x {own.chunks}" if own.chunks > 1 else "")
        stages += f" {each.schedule}" if own.pipeline > 1 else ""
        bound, *others = sorted(each.breakdown.items(), key=lambda part: -part[1])
        bounds = ", ".join(f"{cause} {part / each.step_time_s:.0%}" for cause, part in (bound, others[0]) if part)
        rows.append(
            (str(number), f"{own.tensor}", f"{own.context}", f"{own.data}", stages, *[f"{own.expert}"] * with_experts,
             _sharded(each), f"{own.micro_batch}", own.recompute, format_seconds(each.step_time_s), f"{each.mfu:.1%}",
             format_bytes(each.memory_bytes), bounds, _less(what_if(each, device=2)), _less(what_if(each, links=2)),
             *[_less(what_if(each, node_links=2))] * many)
        )  # fmt: skip
    return "\n".join(
        (
            f"{name}: {plan.shape.num_parameters / 1e9:,.2f} billion parameters, "
            f"{format_number_of(plan.global_batch, 'sequence')} of {plan.shape.length:,} tokens on "
            f"{best.cluster.name}, {best.dtype}",
            f"best: {format_seconds(best.step_time_s)} a step, {best.tokens_per_s:,.0f} tokens/s, MFU {best.mfu:.1%}",
            *aligned(rows, "<" + ">" * (len(rows[0]) - 1)),
            "Closed forms: all times are modelled. 2x: the time that a step loses if GPUs, links inside of nodes, or "
            "links between nodes are twice as fast.",
            "Contexts and experts are priced; the runtime does not run them yet. Sharded states run by "
            "sp.parallel.fully_shard.",
        )
    )


def _less(part: float) -> str:
    return f"-{part:.0%}" if part >= 0.005 else "0%"
