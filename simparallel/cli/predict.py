"""The command `simparallel predict`: a dry run of a script, and its table."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from simparallel.base.argparse_checks import at_least_one, flag
from simparallel.cli import flags
from simparallel.errors import InputError
from simparallel.runtime.ranks.labels import labelled_output

if TYPE_CHECKING:
    from simparallel.predict.prediction import Prediction


def add_arguments(command: argparse.ArgumentParser) -> None:
    flags.add(
        command, "world_size", help="run the script as N ranks; without it, predict what the script itself launches"
    )
    flags.add(command, "cluster")
    flags.add(command, "nodes", help="nodes, with equally many ranks (default: the preset's)")
    flags.add(command, "devices_per_rank")
    flags.add(command, "dtype")
    flags.add(command, "device_memory", help='memory of each device, such as "80GB", at which the program fails')
    command.add_argument("--all-ranks", action="store_true", help="run every rank, not one for all with its program")
    flags.add(command, "out", help="write the events, for simparallel trace and ui.perfetto.dev")
    flags.add(command, "picture", help="draw the timeline of the last step: .svg, .png or .pdf")
    flags.add(command, "json")
    flags.add_script(command, "a Python file; with -n it calls sp.init()")


def main(options: argparse.Namespace) -> None:
    """Predict the script, and print or write the requested output."""
    from simparallel.predict.dry_run import dry_run, predicted_launches
    from simparallel.predict.gpu_calibration import changed_since
    from simparallel.runtime.ranks.script import check_script, run_script

    check_script(options.script, options.module)
    program = partial(run_script, options.script, options.arguments, is_module=options.module)
    found: list[Prediction] = []
    # Standard output is for the table alone. A folded dry run runs ranks again until it knows all programs.
    with labelled_output(sys.stderr, repeats=options.world_size is not None):
        if options.world_size is None:
            for name in ("nodes", "devices_per_rank", "device_memory", "all_ranks"):
                if getattr(options, name):
                    raise InputError(
                        f"predict: {flag(name)} needs -n; without it, the script's own calls of sp.launch decide."
                    )
            with predicted_launches(options.cluster, found, options.dtype):
                program()
        else:
            at_least_one(n=options.world_size, nodes=options.nodes or 1, devices_per_rank=options.devices_per_rank)
            found.append(
                dry_run(
                    program,
                    world_size=options.world_size,
                    cluster=options.cluster,
                    fold=not options.all_ranks,
                    device_memory=options.device_memory,
                    nodes=options.nodes or 1,
                    devices_per_rank=options.devices_per_rank,
                    dtype=options.dtype,
                )
            )
    if not any(len(prediction.trace) for prediction in found):
        raise InputError(
            "predict: the script computed and communicated nothing. With -n N every rank runs it and calls "
            "sp.init(); without, it calls sp.launch."
        )
    for prediction in found:
        _tell(prediction, options)
        why = changed_since(prediction.cluster)
        if why:
            print(f"predict: this machine has changed since it was calibrated, calibrate anew: {why}", file=sys.stderr)


def _tell(prediction: Prediction, options: argparse.Namespace) -> None:
    from simparallel.cli import run_folder

    if options.json:
        numbers = ("step_time_s", "makespan_s", "peak_bytes", "capacity_bytes", "fits")
        values = {name: getattr(prediction, name) for name in numbers}
        print(json.dumps({**values, "ranks": prediction.summary()}, indent=1))
    else:
        print(prediction.table())
    if options.out:
        prediction.trace.save(options.out)
    if options.picture:
        steps = prediction.trace.steps[-1:]
        run_folder.save_and_close(prediction.timeline(steps=steps), Path(options.picture))
    for path in filter(None, (options.out, options.picture)):
        print(f"written: {path}", file=sys.stderr)
