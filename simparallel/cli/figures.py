"""The command `simparallel figures`: draws the pictures of the documentation again, in a checkout.

`tools/draw_figures.py` of the checkout draws them, by the scripts in its `figures/`. They document this project: they
are read, changed and run there, and a package without its documentation has no use for them. The plot functions that
they call are in `simparallel.view`, for any data.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import simparallel
from simparallel.errors import InputError


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all that measure nothing)")
    command.add_argument("--out", metavar="DIR", help="directory for PNG, SVG and GIF (default: beside the scripts)")
    command.add_argument("--measured", action="store_true", help="also those that measure this machine, for minutes")
    command.add_argument("--list", action="store_true", help="show names and captions, and draw nothing")


def main(options: argparse.Namespace) -> int:
    code: int = runpy.run_path(str(find_tool()))["main"](options)
    return code


def find_tool() -> Path:
    """Return `tools/draw_figures.py` of the checkout that this package or the current directory is in.

    Raises:
        InputError: there is none.
    """
    here = Path.cwd()
    for root in (Path(simparallel.__file__).resolve().parents[1], here, *here.parents):
        tool = root / "tools" / "draw_figures.py"
        # The package beside it tells our tool from others of that name.
        if tool.is_file() and (root / "simparallel" / "cli" / "figures.py").is_file():
            return tool
    raise InputError(
        f"figures: {here} is not in a checkout of simparallel, which has a script for each picture in figures/; go to "
        "one. Pictures of your own runs: help(simparallel.view)."
    )
