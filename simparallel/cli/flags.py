"""The options that several commands have, each under one name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from simparallel.backend import ARRAYS
from simparallel.machine.cluster import DEFAULT_DEVICE, PRESETS

# Name -> (how it is written, its settings).
FLAGS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "world_size": (
        ("-n", "--world-size"),
        {"type": int, "metavar": "N", "help": "number of ranks (default: one node)"},
    ),
    "cluster": (
        ("--cluster",),
        {
            "metavar": "NAME",
            "help": f"hardware: a .json file, or one of {', '.join(sorted(PRESETS))} (default {DEFAULT_DEVICE})",
        },
    ),
    "nodes": (("--nodes",), {"type": int, "metavar": "N", "help": "nodes, with equally many ranks"}),
    "devices_per_rank": (
        ("--devices-per-rank",),
        {"type": int, "metavar": "N", "help": "simulated devices of each rank"},
    ),
    "device_memory": (("--device-memory",), {"metavar": "SIZE", "help": 'memory of each device, such as "80GB"'}),
    "batch_size": (
        ("--batch-size",),
        {"type": int, "metavar": "N", "help": "samples in a step, of all ranks together"},
    ),
    "out": (("--out",), {"metavar": "FILE", "help": "write to this file (default: print)"}),
    "picture": (("--picture",), {"metavar": "FILE", "help": "draw the timeline: .svg, .png or .pdf"}),
    "json": (("--json",), {"action": "store_true", "help": "print JSON, not a table"}),
    "array": (("--array",), {"choices": ARRAYS, "default": "numpy"}),
    "module": (
        ("-m", "--module"),
        {"action": "store_true", "help": "SCRIPT is the name of a module, as for python -m"},
    ),
    "script": (("script",), {"help": "a Python file; it calls sp.init()"}),
    "arguments": (("arguments",), {"nargs": argparse.REMAINDER, "help": "passed on to the script"}),
}


def add(
    command: argparse.ArgumentParser, name: str, *also: str, underscores: bool = False, **settings: Any
) -> argparse.Action:
    """Add an option.

    Args:
        command: gets it.
        name: a name in `FLAGS`, or how an option that is not in there is written.
        also: other ways to write it.
        underscores: whether each is also written with underscores.
        settings: of `add_argument`, in place of those in `FLAGS`.
    """
    written, usual = FLAGS.get(name, ((name,), {}))
    words = [*written, *also]
    if underscores:
        words += [f"--{word[2:].replace('-', '_')}" for word in words if word.startswith("--")]
    # The help would list a word twice if both spellings are equal.
    return command.add_argument(*dict.fromkeys(words), **{**usual, **settings})


def add_script(command: argparse.ArgumentParser, **settings: Any) -> None:
    """Add the script and its arguments, which are the last; `settings` are those of the script."""
    add(command, "module")
    add(command, "script", **settings)
    # Otherwise argparse asks for the arguments, too, when SCRIPT is missing.
    add(command, "arguments").required = False
