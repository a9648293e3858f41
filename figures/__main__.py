"""`python -m figures`, in a checkout: draw the pictures of the documentation again.

The scripts are in this folder, each beside its picture. A script has a docstring, whose first line is the caption, and
either `draw()`, which returns a figure or axes, or `main()`, which also writes a page of `docs/`. `animate()` returns
an animation of the same figure. A script that measures this machine states in `MEASURED` how long it takes; all others
give the same picture each time.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from simparallel.base.argparse_checks import Parser, exit_code
from simparallel.base.names import did_you_mean
from simparallel.cli import flags
from simparallel.cli.main import run_command
from simparallel.errors import InputError

FOLDER = Path(__file__).parent
_DPI = 110


@dataclass(frozen=True)
class Script:
    """A script of the folder, read without running it.

    Attributes:
        path: the file.
        caption: first line of its docstring.
        functions: names of its functions.
        measured: how long its measurements take; "" if it measures nothing.
    """

    path: Path
    caption: str
    functions: frozenset[str]
    measured: str

    @property
    def name(self) -> str:
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> Script:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
        assigned = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        caption = (ast.get_docstring(tree) or path.stem).partition("\n")[0]
        return cls(path, caption, functions, str(assigned.get("MEASURED", "")))

    def load(self) -> ModuleType:
        """Import the file. It is in no package, so ranks get its functions by value. It may import `benchmarks`."""
        checkout = str(self.path.resolve().parents[1])
        if checkout not in sys.path:
            sys.path.append(checkout)
        spec = spec_from_file_location(self.name, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def write(self, folder: Path, suffixes: tuple[str, ...] = (".svg", ".png", ".gif")) -> Iterator[Path]:
        """Draw it, write one file for each suffix (.gif only if it is animated), and yield their paths.

        SVG comes first: a figure that was drawn before may have a slightly different layout.
        """
        import matplotlib.pyplot as plt

        from simparallel.view import save_animation, save_figure

        module = self.load()
        stills = [suffix for suffix in suffixes if suffix != ".gif"]
        if stills:
            drawn = module.draw()
            yield from (save_figure(drawn, folder / f"{self.name}{suffix}", _DPI) for suffix in stills)
        if ".gif" in suffixes and "animate" in self.functions:
            yield save_animation(module.animate(), folder / f"{self.name}.gif")
        # pyplot keeps every figure alive until it is closed.
        plt.close("all")


def scripts(folder: Path) -> dict[str, Script]:
    """Return name -> script, sorted by name."""
    return {path.stem: Script.read(path) for path in sorted(folder.glob("[!_]*.py"))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    command = Parser(prog="python -m figures", description="Draw the pictures of the documentation.")
    command.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all that measure nothing)")
    flags.add(command, "out", metavar="DIR", help="folder for PNG, SVG and GIF (default: beside the scripts)")
    command.add_argument("--measured", action="store_true", help="also those that measure this machine, for minutes")
    command.add_argument("--list", action="store_true", help="show names and captions, and draw nothing")
    return run_command(lambda: exit_code(partial(draw, command.parse_args(arguments))))


def draw(options: argparse.Namespace) -> int:
    """Draw what the options name; return the exit code.

    Raises:
        InputError: an unknown name, or another directory for a page of `docs/`.
    """
    found = scripts(FOLDER)
    for name in options.names:
        if name not in found:
            known = f"there are {', '.join(found)}"
            raise InputError(f"figures: there is no {name!r}; {known}.{did_you_mean(name, found)}")
    chosen = [found[name] for name in options.names or found]
    if not options.names and not options.measured and not options.list:
        chosen = [script for script in chosen if not script.measured]
    if options.list:
        width = max(len(script.name) for script in chosen)
        for script in chosen:
            takes = f" Measures: {script.measured}." if script.measured else ""
            print(f"{script.name:<{width}}  {script.caption}{takes}")
        return 0
    pages = [script.name for script in chosen if "draw" not in script.functions]
    if options.out and pages:
        raise InputError(
            f"--out: a page of docs/ is written with {', '.join(pages)}, and shows the pictures in figures/; leave "
            "--out out, or name others."
        )
    for script in chosen:
        if script.name in pages:
            code = subprocess.run([sys.executable, str(script.path)], check=False).returncode
            if code:
                return code
            continue
        for path in script.write(Path(options.out) if options.out else FOLDER):
            print(f"written: {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
