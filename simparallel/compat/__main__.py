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

from simparallel.compat.front import is_public
from simparallel.compat.imports import FRONTS, install
from simparallel.runtime.ranks.script import check_script, run_script

# Doubled braces stand for single ones in str.format.
SHELL = """\
python() {{
    case "$1" in
        -m | *.py) command python -m simparallel.compat {name} "$@" ;;
        *) command python "$@" ;;
    esac
}}
pytest() {{ command python -m simparallel.compat {name} -m pytest "$@"; }}
{launcher}() {{ command python -m simparallel {launcher} --as {name} "$@"; }}
mpirun() {{ command python -m simparallel run --as {name} "$@"; }}
export -f python pytest {launcher} mpirun"""
LAUNCHERS = {"mindspore": "msrun", "torch": "torchrun"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script, or print functions for the shell.

    Raises:
        InputError: there is no such front or script. The script's own errors pass through; a NameError of a name that
            the front has gets a note with the missing import.
    """
    parser = argparse.ArgumentParser(prog="python -m simparallel.compat", description=__doc__.partition("\n")[0])
    parser.add_argument("framework", choices=FRONTS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="[--no-use-env] (SCRIPT | -m MODULE) [ARGUMENTS]")
    given = parser.parse_args(arguments)
    if not given.program:
        print(SHELL.format(name=given.framework, launcher=LAUNCHERS[given.framework]))
        return
    # A second parser, because the arguments of the script would otherwise be searched for options of this command.
    parser = argparse.ArgumentParser(prog=f"python -m simparallel.compat {given.framework}")
    parser.add_argument("--no-use-env", action="store_true", help="give the script --local_rank=N")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(given.program)
    # Before the script is compiled and run: its first imports already mean the front.
    install(given.framework)
    check_script(options.script, options.module)
    try:
        run_script(options.script, options.arguments, options.no_use_env, options.module)
    except NameError as error:
        # The printed listings of tutorials often omit imports.
        for line in _imports_of(given.framework, error.name):
            error.add_note(f"{given.framework} has this name; is one line missing?  {line}")
            break
        raise


def _imports_of(framework: str, name: str | None) -> list[str]:
    """Return the lines that import this name from the framework, the deepest module first."""
    package = import_module(f"simparallel.compat.{framework}")
    below = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [package, *(import_module(module.name) for module in below)]
    found = [
        module.__name__.removeprefix("simparallel.compat.")
        for module in modules
        # A file that also serves as a module below it has itself as an attribute.
        if is_public(found := vars(module).get(name or "")) and found is not module
    ]
    return [f"from {module} import {name}" for module in sorted(found, key=lambda m: -m.count("."))]


if __name__ == "__main__":
    main(sys.argv[1:])
