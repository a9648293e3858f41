"""Write the pages of the API: an entry for every public name, from its docstring, its signature and its source."""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from docstrings import to_markdown
from public_names import Name, main_names, main_path, public_modules, public_names
from signatures import signature_of

import simparallel as sp

ROOT = Path(sp.__file__).parents[1]
FENCE = "`" * 3

# Pages of the names directly in `sp`: title, and the packages that define them.
TOPICS = {
    "running": ("Ranks and runs", {"runtime", "world"}),
    "collectives": ("Collectives and messages", {"algorithms", "base", "collectives", "comm"}),
    "tensors": ("Tensors and gradients", {"autograd", "backend", "nn"}),
    "cutting": ("Layouts, cuts and plans", {"layout", "parallel", "search"}),
    "hardware": ("Hardware, predictions and traces", {"machine", "clock", "predict", "simulate", "trace"}),
    "training": ("Training and checkpoints", {"train"}),
}
OPS = "simparallel.autograd.ops."
# What users do not make themselves: the entry has no signature.
MADE = re.compile(r"\b[Mm]ade by\b")


def page_of(name: Name) -> str:
    """Return the page that documents a name, such as "running", "ops/conv" or "nn.init"."""
    module = str(getattr(name.thing, "__module__", ""))
    if name.parent in ("sp.ops", "sp.functions"):
        return f"ops/{module.removeprefix(OPS)}" if module.startswith(OPS) else name.parent.removeprefix("sp.")
    if name.parent != "sp":
        return name.parent.removeprefix("sp.").removeprefix("simparallel.")
    package = module.removeprefix("simparallel.").partition(".")[0]
    return next((page for page, (_, defined) in TOPICS.items() if package in defined), "running")


def pages() -> dict[str, list[Name]]:
    """Return the public names of each page, in the order of the alphabet."""
    found: dict[str, list[Name]] = {}
    for name in sorted(public_names(), key=lambda name: (name.path.lower(), name.path)):
        found.setdefault(page_of(name), []).append(name)
    return found


def write(folder: Path) -> None:
    """Write all pages and their index, and remove pages of removed names."""
    contents = {page: page_text(page, names) for page, names in pages().items()} | {"index": _index()}
    for page, text in contents.items():
        path = folder / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # an equal page is not built again
            path.write_text(text)
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).with_suffix("").as_posix() not in contents:
            path.unlink()


@cache
def class_paths() -> dict[str, str]:
    """Return the path under which a class is documented, by its own name; the shortest, if several share it."""
    classes = [name for name in main_names() if inspect.isclass(name.thing)]
    return {name.thing.__name__: name.path for name in sorted(classes, key=lambda name: -name.path.count("."))}


@cache
def short_paths() -> dict[str, str]:
    """Return the path of each thing by the last part of its name, where only one thing has that."""
    lasts = [name.last for name in main_names()]
    return {name.last: name.path for name in main_names() if lasts.count(name.last) == 1}


def _module_of(page: str) -> Any:
    """Return the module whose names a page has; None for a topic."""
    if page.startswith("ops/"):
        return import_module(OPS + page.removeprefix("ops/"))
    return public_modules().get(f"sp.{page}") or public_modules().get(f"simparallel.{page}")


def _title(page: str) -> str:
    if page in TOPICS:
        return TOPICS[page][0]
    if "/" in page:
        return page.rpartition("/")[2].replace("_", " ").capitalize()
    return f"`sp.{page}`" if f"sp.{page}" in public_modules() else f"`simparallel.{page}`"


def _index() -> str:
    """Return the page with the names of all pages, in tables."""
    contents = pages()
    plain = [page for page in contents if page not in TOPICS and "/" not in page]
    groups = {
        "`import simparallel as sp`": list(TOPICS),
        "Packages": [page for page in plain if f"sp.{page}" in public_modules()],
        "Ops and functions by family": [page for page in contents if page.startswith("ops/")],
        "Modules to import by their full names": [page for page in plain if f"sp.{page}" not in public_modules()],
    }
    parts = ["# API", "Every public name, with its docstring, its signature and its source."]
    for title, members in groups.items():
        rows = [f"| [{_title(page)}]({page}.md) | {', '.join(map(_link, contents[page]))} |" for page in members]
        parts += [f"## {title}", "\n".join(["| page | names |", "|---|---|", *rows])]
        parts.append("\n".join([f"{FENCE}{{toctree}}", ":hidden:", "", *members, FENCE]))
    return "\n\n".join(parts) + "\n"


def _link(name: Name) -> str:
    return f"{{py:obj}}`{name.last} <{name.path}>`"


def page_text(page: str, names: list[Name]) -> str:
    """Return the Markdown of a page with an entry for each of these names."""
    module = _module_of(page)
    summary = to_markdown(inspect.getdoc(module) or "") if module is not None else ""
    parts = [f"# {_title(page)}", summary, *map(_entry, names)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _entry(name: Name) -> str:
    main = main_path(name.thing)
    if main not in (name.path, None):
        return _directive("data", name.path, [f"The same as {{py:obj}}`{main}`."])
    if inspect.isclass(name.thing):
        return _class_entry(name)
    if inspect.isroutine(name.thing):
        parts = [to_markdown(inspect.getdoc(name.thing) or ""), _source(name.thing)]
        return _directive("function", name.path + signature_of(name.thing), parts)
    shown = repr(name.thing)
    return _directive("data", name.path, [f"`{shown}`" if len(shown) < 200 else f"A {type(name.thing).__name__}."])


def _directive(kind: str, signature: str, parts: list[str], *options: str, ticks: int = 5) -> str:
    fence = "`" * ticks
    body = "\n\n".join(filter(None, parts))
    return "\n".join([f"{fence}{{py:{kind}}} {signature}", *options, "", body, fence])


def _class_entry(name: Name) -> str:
    cls = name.thing
    text = (inspect.getdoc(cls) or "") if cls.__doc__ else ""
    is_error = issubclass(cls, BaseException)
    signature = "" if is_error or MADE.search(text) else signature_of(cls)
    parts = [to_markdown(text), _bases(cls), _rule(cls), _source(cls), *(_member(*member) for member in members(cls))]
    return _directive("exception" if is_error else "class", name.path + signature, parts)


def members(cls: type) -> list[tuple[str, Any]]:
    """Return the documented methods and properties of a class that its public bases lack."""
    inherited = {base for other in cls.__mro__[1:] if main_path(other) for base in other.__mro__}
    # A method of Op that an op defines is part of it, and not for users to call.
    hidden = set(dir(sp.ops.Op)) if sp.ops.Op in inherited else set()
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base in inherited or not base.__module__.startswith("simparallel"):
            continue
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            is_member = inspect.isfunction(function) or isinstance(member, property)
            is_shown = not name.startswith("_") and name not in hidden and main_path(function) is None
            if is_member and is_shown and member.__doc__:
                found.setdefault(name, member)
    return list(found.items())


def _member(name: str, member: Any) -> str:
    text = to_markdown(inspect.getdoc(member) or "")
    options = [":no-contents-entry:"]
    if isinstance(member, property):
        return _directive("property", name, [text], *options, ticks=4)
    if isinstance(member, (classmethod, staticmethod)):
        options.append(f":{type(member).__name__}:")
    signature = signature_of(getattr(member, "__func__", member), is_method=not isinstance(member, staticmethod))
    return _directive("method", name + signature, [text], *options, ticks=4)


def _bases(cls: type) -> str:
    public = [f"{{py:obj}}`{main_path(base)}`" for base in cls.__bases__ if main_path(base)]
    builtin = [f"`{base.__name__}`" for base in cls.__bases__ if base.__module__ == "builtins" and base is not object]
    return f"Base: {', '.join(public + builtin)}" if public + builtin else ""


def _rule(cls: type) -> str:
    """Return the rule of an op, which says what dims its tensors have and which of these may be cut."""
    if not issubclass(cls, sp.ops.Op) or cls is sp.ops.Op:
        return ""
    rule = getattr(cls, "rule", None)
    shown = f"`{rule}`" if isinstance(rule, str) else "depends on the shapes or the settings."
    return f"{{py:obj}}`Rule <sp.ops.Op>`: {shown}"


def _source(thing: Any) -> str:
    """Return the file and the line of a definition, as the role `source` takes them."""
    defined = inspect.unwrap(thing)
    try:
        line = inspect.getsourcelines(defined)[1]
        path = Path(inspect.getsourcefile(defined) or "").relative_to(ROOT)
    except (TypeError, OSError, ValueError):  # made at run time
        return ""
    return f"{{source}}`{path.as_posix()}:{line}`"
