"""The command `simparallel trace`: view a trace in a browser, summarise, draw, export it, or compare two."""

from __future__ import annotations

import argparse
from pathlib import Path

import simparallel as sp
from simparallel.base.argparse_checks import flag, numbers
from simparallel.base.units import format_number_of
from simparallel.cli import flags
from simparallel.errors import InputError
from simparallel.trace.export import FORMATS

# Action -> (number of traces, options that apply to it).
ACTIONS = {
    "summary": (1, ("picture", "clock", "steps", "all_steps")),
    "view": (1, ("out", "open")),
    "export": (1, ("out", "format")),
    "diff": (2, ()),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file",
        nargs="+",
        metavar="FILE",
        help="a trace.json; before it view (write a timeline for a browser), summary (the default), export, "
        "or diff and two of them",
    )
    flags.add(
        command,
        "out",
        metavar="PATH",
        help="view, export: what to write; a directory for the formats kineto (as torch.profiler writes) and chakra",
    )
    command.add_argument("--open", action="store_true", help="view: open it in a browser")
    command.add_argument("--format", choices=FORMATS, help="export: of the file, or of the files of all ranks")
    flags.add(command, "picture")
    command.add_argument(
        "--clock",
        choices=("sim", "wall", "both"),
        help="of the picture: simulated time (default), measured time, or the one above the other",
    )
    shown = command.add_mutually_exclusive_group()
    shown.add_argument(
        "--steps", type=numbers, metavar="N,…", help="of the picture: only these steps (default: two from the middle)"
    )
    shown.add_argument("--all-steps", action="store_true", help="of the picture: all steps")


def main(options: argparse.Namespace) -> None:
    """Run the action that the first word names; a trace alone is summarised."""
    action, files = _action(options.file)
    count, applying = ACTIONS[action]
    if len(files) != count:
        given = format_number_of(len(files), "trace")
        raise InputError(
            f"trace {action}: {given}, but it takes {count}. Name one trace.json, or two of them after diff: "
            "simparallel trace diff run.json p.json"
        )
    for owner, (_, names) in ACTIONS.items():
        for name in names:
            if getattr(options, name) and name not in applying:
                raise InputError(f"{flag(name)} applies to trace {owner}, not to trace {action}.")
    for name in ("steps", "clock", "all_steps"):
        if getattr(options, name) and not options.picture:
            raise InputError(f"{flag(name)} applies to the picture, but none is drawn; name it with --picture FILE.")
    if action == "diff":
        from simparallel.trace.diff import diff

        print(diff(*map(sp.Trace.load, files)).table())
    else:
        do = {"summary": _summarise, "view": _view, "export": _export}[action]
        do(sp.Trace.load(files[0]), Path(files[0]), options)


def _action(words: list[str]) -> tuple[str, list[str]]:
    # A single word is a trace, even if it is also the name of an action.
    if len(words) > 1 and words[0] in ACTIONS:
        return words[0], words[1:]
    return "summary", words


def _view(trace: sp.Trace, file: Path, options: argparse.Namespace) -> None:
    path = trace.html(options.out or file.with_suffix(".html"))
    print(f"written: {path}")
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _export(trace: sp.Trace, file: Path, options: argparse.Namespace) -> None:
    if not options.format or not options.out:
        missing = " and ".join(f"--{name}" for name in ("format", "out") if not getattr(options, name))
        raise InputError(f"trace export: give {missing}: --format {'|'.join(FORMATS)} --out PATH.")
    print(f"written: {', '.join(map(str, trace.export(options.out, options.format)))}")


def _summarise(trace: sp.Trace, file: Path, options: argparse.Namespace) -> None:
    from simparallel.cli import run_folder

    print(trace.table())
    if options.picture:
        steps = options.steps
        if steps is None and not options.all_steps:
            # A whole run does not fit into a picture.
            steps = run_folder.middle_steps(trace)
        run_folder.save_and_close(trace.timeline(clock=options.clock or "sim", steps=steps), Path(options.picture))
        shown = "" if steps is None else f" (of {len(trace.steps)} steps: {', '.join(map(str, steps))})"
        hint = "; --steps N,… or --all-steps choose others" if options.steps is None and steps else ""
        print(f"written: {options.picture}{shown}{hint}")
