"""The options that several commands have, each under one name."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from simparallel.backend import ARRAYS
from simparallel.base.argparse_checks import flag
from simparallel.machine.cluster import DEFAULT_DEVICE, PRESETS
from simparallel.machine.device import DTYPES

HARDWARE = f"hardware: a .json file, or one of {', '.join(sorted(PRESETS))}"
# Name -> its settings; world_size is written --world-size.
FLAGS: Mapping[str, Mapping[str, Any]] = {
    "world_size": {"type": int, "metavar": "N", "help": "number of ranks (default: all of the file, or one node)"},
    "cluster": {"metavar": "NAME", "help": f"{HARDWARE} (default {DEFAULT_DEVICE})"},
    "nodes": {"type": int, "metavar": "N", "help": "nodes, with equally many ranks"},
    "devices_per_rank": {
        "type": int,
        "metavar": "N",
        "help": "simulated devices of each rank (default: those it names)",
    },
    "dtype": {"choices": DTYPES, "help": "what the described devices compute in (default float32)"},
    "device_memory": {"metavar": "SIZE", "help": 'memory of each device, such as "80GB"'},
    "batch_size": {"type": int, "metavar": "N", "help": "samples in a step, of all ranks together"},
    "out": {"metavar": "FILE", "help": "write to this file (default: print)"},
    "picture": {"metavar": "FILE", "help": "draw the timeline: .svg, .png or .pdf"},
    "json": {"action": "store_true", "help": "print JSON, not a table"},
    "array": {"choices": ARRAYS, "default": "numpy"},
    "module": {"action": "store_true", "help": "SCRIPT is the name of a module, as for python -m"},
}
_SHORT = {"world_size": ("-n",), "module": ("-m",)}


def add(command: argparse.ArgumentParser, name: str, *also: str, underscores: bool = False, **settings: Any) -> None:
    """Add an option.

    Args:
        command: the parser that gets it.
        name: a name in `FLAGS`, or any other option as it is spelled.
        also: further spellings.
        underscores: accept each spelling with underscores, too.
        settings: arguments of `add_argument`, which replace those in `FLAGS`.
    """
    words = [*_SHORT.get(name, ()), flag(name) if name in FLAGS else name, *also]
    if underscores:
        words += [f"--{word[2:].replace('-', '_')}" for word in words if word.startswith("--")]
    # The help would list a word twice if both spellings are equal.
    command.add_argument(*dict.fromkeys(words), **{**FLAGS.get(name, {}), **settings})


def add_script(command: argparse.ArgumentParser, script_help: str) -> None:
    """Add the script and its arguments, which come last."""
    add(command, "module")
    command.add_argument("script", help=script_help)
    rest = command.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    # Otherwise argparse asks for the arguments, too, when SCRIPT is missing.
    rest.required = False
