"""Run a user's script as a rank: `simparallel run -n 4 train.py`."""

from __future__ import annotations

import os
import sys
import types
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from simparallel.base.hints import FRONTS
from simparallel.errors import InputError


def check_script(name: str, is_module: bool = False) -> None:
    """Check, before any process is started, that a file compiles or that a module exists.

    Raises:
        InputError: missing, unreadable, a notebook, or with a syntax error (with its line).
    """
    if not is_module:
        if name.endswith(".ipynb"):
            raise InputError(
                f"{name} is a notebook: call sp.launch in it, or export it as a script (jupyter nbconvert --to script)."
            )
        _compile(name)
        return
    if name.endswith(".py"):
        module = name.removesuffix(".py").replace(os.sep, ".")
        raise InputError(f"-m {name}: name the module without .py: -m {module}")
    # Look for the top-level package only: finding a submodule would run its parent packages.
    top = name.partition(".")[0]
    if PathFinder.find_spec(top, ["", *sys.path]) is None and find_spec(top) is None:
        raise InputError(f"-m {name}: there is no module {top} here or on the path.")


def run_script(name: str, arguments: list[str], with_local_rank: bool = False, is_module: bool = False) -> None:
    """Run a file like `python FILE`, or a module like `python -m MODULE`: as `__main__`, with its folder on the path.

    Args:
        name: path of the file, or name of the module.
        arguments: its command-line arguments.
        with_local_rank: put `--local_rank=N` first, which scripts for torch.distributed.launch read.
        is_module: `name` is a module.

    Raises:
        InputError: it cannot be found, read or compiled.
        Also the script's own errors; a missing framework that has a front gets a note with the option.
    """
    if with_local_rank:
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    # A module of its own, so that the script neither sees nor replaces the names of the process's `__main__`.
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    # As `python -m` does: the current directory first on the path. A file has its own folder there.
    if is_module:
        sys.path.insert(0, os.getcwd())
        code = _code_of_module(name, module)
        sys.argv = [str(module.__file__), *arguments]
    else:
        code = _compile(name)
        module.__file__ = os.path.abspath(name)
        sys.argv = [name, *arguments]
        sys.path.insert(0, str(Path(name).resolve().parent))
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except ModuleNotFoundError as error:
        if error.name in FRONTS:
            error.add_note(f"With simparallel's front in its place: simparallel run --as {error.name} -n N {name}")
        raise


def _code_of_module(name: str, module: types.ModuleType) -> types.CodeType:
    """Return the code of a module, or of a package's `__main__`; set the attributes for relative imports."""
    # A package is run by its `__main__`, as by `python -m`.
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    loader = spec and spec.loader
    code = loader.get_code(spec.name) if isinstance(loader, InspectLoader) and spec else None
    if code is None or spec is None:
        raise InputError(f"-m {name}: there is no such module, or it has no Python code to run.")
    module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
    return code


def _compile(path: str) -> types.CodeType:
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory; name the script to run.")
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"script {path} cannot be read: {error.strerror}.") from error
    try:
        # dont_inherit: without the __future__ imports of this file.
        return compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        raise InputError(f"{path}:{error.lineno}: syntax error: {error.msg}\n    {text.strip()}") from error
    except ValueError as error:
        # Null bytes.
        raise InputError(f"{path} is not a Python script: {error}.") from error
