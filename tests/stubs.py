"""Write the stubs that tell type checkers and editors what the ops register: `python tests/stubs.py`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

from simparallel import autograd, collectives
from simparallel.autograd import Op
from simparallel.autograd.methods import FUNCTIONS, TensorMethods
from simparallel.comm.collective import COLLECTIVES

ROOM = Path(autograd.__file__).parent
# Their results are of one type; `gather` gives a list on one rank and None on the others.
OVERLOADED = ("all_reduce", "broadcast", "reduce", "scan", "exscan", "all_gather", "reduce_scatter", "all_to_all")
PLACE = "simparallel.autograd.ops."
HEAD = '"""Written by tests/stubs.py; do not edit."""\n\n'
TYPES = """from collections.abc import Sequence
from typing import Any, Self

from simparallel.autograd.dims import Dims
from simparallel.autograd.ops.along import Largest
from simparallel.autograd.tensor import Tensor
from simparallel.layout.layout import Layout

class MethodTypes:
"""


class Raw(str):
    """An annotation, which `inspect` shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def exports(things: dict[str, Any]) -> str:
    """Import what the files of the ops define, under the registered names."""
    by_module: dict[str, list[str]] = {}
    for name, thing in sorted(things.items()):
        if thing.__module__.startswith(PLACE):
            by_module.setdefault(thing.__module__, []).append(f"{name} as {name}")
    lines = [f"from {module} import ({', '.join(names)})" for module, names in sorted(by_module.items())]
    return "\n".join(fill(line, 120, subsequent_indent="    ") for line in lines)


def registered() -> list[str]:
    """Return the names of the methods of Tensor that the class body does not define."""
    (body,) = ast.parse(inspect.getsource(TensorMethods)).body
    assert isinstance(body, ast.ClassDef)
    written = {getattr(node, "name", None) for node in ast.walk(body)}
    return sorted(
        name for name, value in vars(TensorMethods).items() if inspect.isfunction(value) and name not in written
    )


def typed(name: str, method: Callable[..., Any]) -> str:
    """Return the line of a method; an operator lacks arguments by name."""
    signature, is_operator = inspect.signature(method), name.startswith("__")
    _, *others = signature.parameters.values()
    others = [p for p in others if not (is_operator and p.kind is p.KEYWORD_ONLY)]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    result = "Self" if method.__name__.startswith("__i") else signature.return_annotation
    parameters = [this, *(p.replace(annotation=raw(p.annotation)) for p in others)]
    return f"    def {name}{signature.replace(parameters=parameters, return_annotation=raw(result))}: ..."


def raw(annotation: Any) -> Any:
    return Raw(annotation) if isinstance(annotation, str) else annotation


def typed_collective(name: str) -> str:
    """Return the overloads of a collective: a result like x, a `Work` where `async_op` is True, or `out`."""
    given = [
        p.replace(annotation=raw(p.annotation))
        for p in inspect.signature(getattr(collectives, name)).parameters.values()
    ]
    place = [p.name for p in given].index("async_op")

    def overload(result: str, named: bool = False, **types: str) -> str:
        """Return a line; parameters of these types have no default. `named`: by name from `async_op` on."""
        own = [p.replace(annotation=Raw(types[p.name]), default=p.empty) if p.name in types else p for p in given]
        if named:
            own = [*own[:place], *(p.replace(kind=p.KEYWORD_ONLY) for p in own[place:])]
        elif "async_op" in types:
            # Before a parameter without a default there can be none with one.
            own = [*(p.replace(default=p.empty) for p in own[:place]), *own[place:]]
        else:
            blocking = {"async_op": "Literal[False]", "out": "None"}
            own = [
                p.replace(annotation=Raw(blocking[p.name])) if p.name in blocking and p.name not in types else p
                for p in own
            ]
        return f"@overload\ndef {name}{inspect.Signature(own, return_annotation=Raw(result))}: ..."

    # A new result is an array, also of a Tensor.
    lines = [] if COLLECTIVES[name].in_place else [overload("np.ndarray", x="Tensor")]
    lines += [overload("_X", x="_X"), overload("Work", True, x="Any", async_op="Literal[True]")]
    lines += [overload("Any", named, x="Any", async_op="bool") for named in (True, False)]
    return "\n".join(lines + [overload("_X", x="Any", out="_X") for p in given if p.name == "out"])


def collectives_stub() -> str:
    """Return the stub of `simparallel.collectives`: its own imports, but for the collectives with overloads."""
    source = Path(collectives.__file__).read_text()
    names = [name for name in COLLECTIVES if name in OVERLOADED]
    imports = [
        f"from {node.module} import {alias.name} as {alias.name}"
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name not in OVERLOADED and node.module != "simparallel.base.hints"
    ]
    head = [
        "from collections.abc import Sequence",
        "from typing import Any, Literal, TypeVar, overload\n",
        "import numpy as np\n",
        "from simparallel.autograd import Tensor",
        *imports,
        "from simparallel.comm import Group, Work\n",
        '_X = TypeVar("_X")\n',
    ]
    return HEAD + "\n".join([*head, *map(typed_collective, names)]) + "\n"


def stubs() -> dict[Path, str]:
    """Return the text of each stub."""
    methods = "\n".join(typed(name, getattr(TensorMethods, name)) for name in registered())
    return {
        ROOM / "ops/__init__.pyi": HEAD + exports(Op.registry) + "\n",
        ROOM / "functions.pyi": HEAD + exports(FUNCTIONS) + "\n",
        ROOM / "method_types.pyi": HEAD + TYPES + methods + "\n",
        ROOM.parent / "collectives/__init__.pyi": collectives_stub(),
    }


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
