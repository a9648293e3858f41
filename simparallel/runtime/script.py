"""Running a user's script as a rank: `simparallel run -n 4 train.py`."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

from simparallel.errors import InputError


def check_script(path: str) -> None:
    """Is it a Python file that compiles? Found out before any process is started.

    Raises:
        InputError: missing, unreadable, or with a syntax error (with its line).
    """
    _compile(path)


def run_script(path: str, arguments: list[str], with_local_rank: bool = False) -> None:
    """Run the file as `__main__`, with its own directory first on the path, as `python path` does.

    `with_local_rank`: its first argument is `--local_rank=N`, which scripts for torch.distributed.launch read.
    """
    if with_local_rank:
        arguments = [f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    code = _compile(path)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _compile(path: str) -> types.CodeType:
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory; name the script to run.")
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"script {path} cannot be read: {error.strerror}.") from error
    try:
        return compile(source, path, "exec")
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        raise InputError(f"{path}:{error.lineno}: syntax error: {error.msg}\n    {text.strip()}") from error
    except ValueError as error:  # null bytes
        raise InputError(f"{path} is not a Python script: {error}.") from error
