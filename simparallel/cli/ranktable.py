"""`simparallel rank-table check | convert | merge | make`."""

from __future__ import annotations

import argparse
import sys

from simparallel.base.argparse_checks import at_least_one
from simparallel.base.files import write_atomically
from simparallel.cli import flags
from simparallel.machine.ranktable.reading import load
from simparallel.machine.ranktable.table import FORMS, RankTable, make_rank_table, merge_rank_tables
from simparallel.machine.ranktable.writing import format_rank_table


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `simparallel rank-table`."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    check = actions.add_parser("check", help="read a rank table; say what it has, or what is wrong and where")
    check.add_argument("files", nargs="+", metavar="FILE")

    convert = actions.add_parser("convert", help="write it in the other form")
    convert.add_argument("file")
    convert.add_argument("--to", choices=FORMS, help="by default the form that it does not have")

    merge = actions.add_parser("merge", help="join the tables of several servers; ranks are numbered anew")
    merge.add_argument("files", nargs="+", metavar="FILE", help="in the order of their ranks")
    merge.add_argument("--form", choices=FORMS, help="by default that of the first")

    for reading in (check, convert, merge):
        reading.add_argument("--strict", action="store_true", help="an error where otherwise there is a warning")

    make = actions.add_parser("make", help="make one")
    make.add_argument("--servers", type=int, default=1, metavar="N", help="number of servers (default %(default)s)")
    make.add_argument("--devices", type=int, default=8, metavar="N", help="on each server (default %(default)s)")
    make.add_argument(
        "--server-id",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address of a server; once for each (default 127.0.0.1, 127.0.0.2, …: this machine)",
    )
    make.add_argument("--form", choices=FORMS, default="1.0", help="default %(default)s")

    for writing in (convert, merge, make):
        flags.add(writing, "out")


def main(options: argparse.Namespace) -> None:
    """Run the action.

    Raises:
        RankTableError: a table cannot be read, or breaks a rule.
        InputError: the table cannot be made or merged.
        OSError: it cannot be written.
    """
    if options.action == "check":
        for file in options.files:
            print(warned(load(file, strict=options.strict)).describe())
        return
    if options.action == "convert":
        table = warned(load(options.file, strict=options.strict))
        # There are two forms, so the default is the other one.
        form = options.to or next(form for form in FORMS if form != table.form)
    elif options.action == "merge":
        table = merge_rank_tables([warned(load(file, strict=options.strict)) for file in options.files])
        form = options.form or table.form
    else:
        at_least_one(servers=options.servers, devices=options.devices)
        table, form = make_rank_table(options.servers, options.devices, options.server_id), options.form
    text = format_rank_table(table, form)
    if options.out is None:
        print(text, end="")
    else:
        write_atomically(options.out, text.encode())
        print(f"written: {options.out}")


def warned(table: RankTable) -> RankTable:
    """Print the warnings of a table, and return it."""
    # To standard error: the table itself may go to standard output, as JSON.
    for warning in table.warnings:
        print(f"simparallel: warning: {warning}", file=sys.stderr)
    return table
