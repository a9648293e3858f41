"""`simparallel zoo [NAME]`."""

from __future__ import annotations

import argparse

from simparallel.errors import InputError


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `simparallel zoo`."""
    command.add_argument("name", nargs="?", metavar="NAME", help="show this program, and run it (default: list all)")
    command.add_argument("--source", action="store_true", help="print the wrong program alone, to mend it yourself")


def main(options: argparse.Namespace) -> None:
    """List the programs, or show one.

    Raises:
        UnknownNameError: there is no such program.
        InputError: `--source` is given without a program.
    """
    from simparallel import zoo

    if options.source:
        if options.name is None:
            raise InputError("zoo: --source prints one program; name it: simparallel zoo NAME --source.")
        print(zoo.get(options.name).source, end="")
    else:
        print(zoo.table() if options.name is None else zoo.get(options.name))
