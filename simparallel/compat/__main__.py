"""`python -m simparallel.compat mindspore train.py`: run a script with the front in place of MindSpore.

python -m simparallel.compat torch [--no-use-env] (SCRIPT | -m MODULE) [ARGUMENTS]
eval "$(python -m simparallel.compat torch)"     # makes this shell's python, pytest, torchrun and mpirun do so, too
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from simparallel.base.argparse_checks import Parser
from simparallel.compat.front import is_public
from simparallel.compat.imports import FRONTS, install
from simparallel.runtime.ranks.script import check_script, run_script
from simparallel.world.context import set_context

# Doubled braces stand for single ones in str.format.
SHELL = """\
python() {{
    case "$1" in
        -m | *.py) command python -m simparallel.compat {name} "$@" ;;
        *) command python "$@" ;;
    esac
}}
pytest() {{ command python -m simparallel.compat {name} -m pytest "$@"; }}
{launcher}() {{ command python -m simparallel {launcher} "$@"; }}
mpirun() {{ command python -m simparallel run --as {name} "$@"; }}
export -f python pytest {launcher} mpirun"""
LAUNCHERS = {"mindspore": "msrun", "torch": "torchrun"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script, or print functions for the shell.

    Raises:
        InputError: there is no such front or script. The script's own errors pass through; a NameError of a name that
            the front has gets a note with the missing import.
    """
    parser = Parser(prog="python -m simparallel.compat", description=__doc__.partition("\n")[0])
    parser.add_argument("framework", choices=FRONTS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="[--no-use-env] (SCRIPT | -m MODULE) [ARGUMENTS]")
    given = parser.parse_args(arguments)
    if not given.program:
        print(SHELL.format(name=given.framework, launcher=LAUNCHERS[given.framework]))
        return
    # A second parser, because the arguments of the script would otherwise be searched for options of this command.
    parser = Parser(prog=f"python -m simparallel.compat {given.framework}")
    parser.add_argument("--no-use-env", action="store_true", help="give the script --local_rank=N")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(given.program)
    # Before the script is compiled and run: its first imports already mean the front.
    install(given.framework)
    if given.framework == "mindspore":
        # The device that MindSpore's packages are made for, unless the script or the run names another one.
        set_context(device_target="Ascend")
    check_script(options.script, options.module)
    try:
        run_script(options.script, options.arguments, options.no_use_env, options.module)
    except NameError as error:
        # The printed listings of tutorials often omit imports.
        if line := _import_of(given.framework, error.name):
            error.add_note(f"{given.framework} has this name; is one line missing?  {line}")
        raise


def _import_of(framework: str, name: str | None) -> str | None:
    """Return the shortest line that imports this name from the framework, an object rather than a module."""
    package = import_module(f"simparallel.compat.{framework}")
    below = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [package, *(import_module(module.name) for module in below)]
    found = {
        f"from {module.__name__.removeprefix('simparallel.compat.')} import {name}": vars(module)[name]
        for module in modules
        if name in vars(module) and is_public(vars(module)[name])
    }
    return min(found, key=lambda line: (isinstance(found[line], ModuleType), len(line)), default=None)


if __name__ == "__main__":
    main(sys.argv[1:])
