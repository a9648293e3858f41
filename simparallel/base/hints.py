"""Answers for names that do not exist: where the name is, a similar name, or the page of missing features."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from json import loads
from opcode import opmap
from pathlib import Path
from types import ModuleType
from typing import Any

# The frameworks whose names `simparallel.compat` has.
FRONTS = ("mindspore", "torch")
PAGE = "docs/not_here.md"
_FRONTS = "simparallel.compat."
# The modules with public names, and where these are defined.
_MODULES = {
    **{name: name for name in ("", "nn", "nn.init", "optim", "optim.schedules", "data", "parallel", "train", "models")},
    **{name: name for name in ("view", "testing", "errors")},
    "functions": "autograd.functions", "cluster": "machine.cluster", "ops": "ops",
}  # fmt: skip


@cache
def _table() -> tuple[dict[str, str], dict[str, str]]:
    """Return {name in another package: its name here}, and {pattern of names: answer} for missing features."""
    table = loads(Path(__file__).with_name("names_elsewhere.json").read_text("utf-8"))
    here = {name: answer for answer, names in table["here"].items() for name in names.split()}
    return here, {name: answer for answer, names in table["missing"].items() for name in names.split()}


class Answer:
    """The message of an error about a missing name, with a suggestion.

    Names are searched only when the message is shown, because programs often probe for attributes.

    Args:
        owner: what lacks the name: a module, given by its name, or an object.
        name: the missing name.
        imports: whether to import the modules in which the name may be; else imported ones are searched.
        message: its beginning; by default that the attribute does not exist.
        prefix: precedes the name in the table of names elsewhere; if given, only the owner's own names are suggested.
    """

    def __init__(self, owner: Any, name: str, imports: bool = False, message: str = "", prefix: str = "") -> None:
        self.owner, self.name, self.imports, self.prefix = owner, name, imports, prefix
        shown = f"module {_shown(owner)!r}" if isinstance(owner, str) else f"{type(owner).__name__!r} object"
        self.message = message or f"{shown} has no attribute {name!r}"

    def __str__(self) -> str:
        # Tools probe for names such as __wrapped__.
        return self.message if self.name.startswith("_") else f"{self.message}{self._answer()}"

    __repr__ = __str__

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Not every owner can be pickled: keep the message.
        return str, (str(self),)

    def _answer(self) -> str:
        own = _public(sys.modules.get(self.owner)) if isinstance(self.owner, str) else dir(self.owner)
        places = {} if self.prefix else self._places()
        alike = {_plain(name): place for name, place in places.items()}
        mine = {_plain(name): name for name in own if not name.startswith("_")}
        here, missing = _table()
        asked, plain = self.prefix + self.name, _plain(self.name)
        # The full name of a module that shares its last part with something else, such as torch.distributed.tensor.
        full = f"{_shown(self.owner)}.{self.name}" if isinstance(self.owner, str) else ""
        found = places.get(self.name) or mine.get(plain) or here.get(asked) or alike.get(plain)
        if found := here.get(full) or ("" if full in missing else found):
            return f"; here it is {found}."
        for pattern, answer in missing.items():
            if full == pattern or fnmatchcase(asked, pattern):
                return f"; missing feature: {answer}, see {PAGE}."
        for known in (mine, alike):
            # Short names are alike by chance, such as lu and elu.
            if near := get_close_matches(plain, known, 2, 0.75 if len(plain) > 5 else 0.81):
                return f". Did you mean {' or '.join(known[name] for name in near)}?"
        # With a prefix, the owner may have attributes of a user's subclass, which the page cannot list.
        return "" if self.prefix else f". {PAGE} lists missing features and alternatives."

    def _places(self) -> dict[str, str]:
        """Return name -> its full name, in the owner's front or in this package; the first place wins."""
        found: list[tuple[str, str]] = []
        front = ".".join(str(self.owner).split(".")[:3])
        if front.startswith(_FRONTS):
            for module in sorted((name for name in sys.modules if f"{name}.".startswith(f"{front}.")), key=len):
                found += [
                    (key, f"{_shown(module)}.{key}") for key, value in vars(sys.modules[module]).items() if _ours(value)
                ]
        for public, place in _MODULES.items():
            public, module = (f"simparallel.{name}".rstrip(".") for name in (public, place))
            try:
                found_in = import_module(module) if self.imports else sys.modules.get(module)
            except ImportError:
                # It needs a package that is not installed, or the message is shown in the middle of an import.
                continue
            found += [(name, f"{public}.{name}") for name in _public(found_in)]
        return dict(reversed(found))


def _shown(module: str) -> str:
    return module.removeprefix(_FRONTS)


def _public(module: ModuleType | None) -> list[str]:
    names = {} if module is None else vars(module)
    return dir(module) if "__dir__" in names else list(names.get("__all__", names))


def _ours(value: object) -> bool:
    return not isinstance(value, ModuleType) and str(getattr(value, "__module__", "")).startswith("simparallel")


def _plain(name: str) -> str:
    # Case and underscores make no difference, but a trailing underscore does: PyTorch's add_ works in place.
    return name[:-1].replace("_", "").casefold() + name[-1:].casefold()


def attribute(owner: object, name: str, prefix: str = "") -> Any:
    """Raise AttributeError with an `Answer` for a name that an object does not have: the body of its `__getattr__`."""
    # A property that raised AttributeError: call it again, so that its own message is shown.
    if any(name in vars(kind) for kind in type(owner).__mro__):
        return object.__getattribute__(owner, name)
    # Without obj=, or Python would add a second suggestion to the traceback.
    raise AttributeError(Answer(owner, name, prefix=prefix), name=name)


def answer_unknown_names(module: str, find: Callable[[str], Any] | None = None, imports: bool = False) -> None:
    """Give a module a `__getattr__` whose errors have an `Answer`: AttributeError, and ImportError for `from … import`.

    With an `__all__`, tab completion lists its names alone, without the module's imports.

    A call, and not an assignment in the module: for type checkers a module with `__getattr__` has every name.

    Args:
        module: its name.
        find: returns the value of a name that the module imports or registers late; raises KeyError for others.
        imports: see `Answer`.
    """

    def __getattr__(name: str) -> Any:
        if find is not None:
            with suppress(KeyError):
                return find(name)
        caller = sys._getframe(1)
        # Python replaces an AttributeError by an ImportError without a hint.
        if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
            message = f"cannot import name {name!r} from {_shown(module)!r}"
            raise ImportError(Answer(module, name, imports, message), name=_shown(module))
        raise AttributeError(Answer(module, name, imports), name=name)

    names = vars(sys.modules[module])
    names.setdefault("__getattr__", __getattr__)
    if "__all__" in names:
        names.setdefault("__dir__", lambda: sorted({*names["__all__"], *(name for name in names if name[:2] == "__")}))
