"""Descriptions of hardware as JSON files and as tables, from the fields of their dataclasses.

A file has the arguments of a dataclass as keys, and defaults may be left out. The dataclass checks the values; this
module adds path, line and key to its errors. Files written by hand may have comments from // on, and trailing commas.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from inspect import signature
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from simparallel.base.files import write_atomically
from simparallel.base.names import did_you_mean
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_count, format_number_of, format_seconds
from simparallel.errors import ClusterError
from simparallel.machine.links import Groups
from simparallel.machine.ranktable.jsontext import JsonError, JsonNode, parse, read_file, shown

T = TypeVar("T")

_hints, _signature = cache(get_type_hints), cache(signature)


# --- writing -------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a description as plain data for JSON; fields with their default are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = {}
        for each in fields(value):
            found = getattr(value, each.name)
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if found != default:
                shown[each.name] = _grouped(found) if _hints(type(value))[each.name] == Groups else plain(found)
        return shown
    if isinstance(value, Mapping):
        return {"-".join(map(str, key)) if isinstance(key, tuple) else str(key): plain(value[key]) for key in value}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _grouped(groups: Groups) -> Any:
    flat = [rank for group in groups for rank in group]
    is_even = flat == list(range(len(flat))) and len({len(group) for group in groups}) == 1
    return len(groups) if is_even else [list(group) for group in groups]


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a description to a JSON file.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    # Put lists of numbers on one line. No match lies inside a string: JSON escapes the line breaks of strings.
    text = re.sub(
        r"\[\n[\s\d.e+,-]*\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text
    )
    write_atomically(path, f"{text}\n".encode())


# --- reading -------------------------------------------------------------------------------------


def load(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read a dataclass from a JSON file.

    Raises:
        ClusterError: the file cannot be read, or an entry is missing, unknown or out of range. Facts: `path`, `line`
            and `key` of the entry, None where there is none.
    """
    name = os.fspath(path)
    reader = _DescriptionReader(name)
    data = read_file(name, key=None)
    try:
        # Comments and trailing commas do not change the meaning.
        node = parse(data, lambda _line, _text: None)
    except JsonError as error:
        raise ClusterError(f"{name}:{error.line}: {error}.", path=name, line=error.line, key=None) from None
    found: T = reader.read(node, kind)
    return found


def from_plain(kind: type[T], data: Any, name: str) -> T:
    """Read a dataclass from data of `json.loads`; `name` is for errors.

    Raises:
        ClusterError: as `load`, without a line.
    """
    found: T = _DescriptionReader(name).read(_node(data), kind)
    return found


def _node(data: Any, around: JsonNode | None = None, key: str | int = "") -> JsonNode:
    node = JsonNode(data, 0, around, key)
    if isinstance(data, dict):
        node.value = {name: _node(item, node, name) for name, item in data.items()}
    elif isinstance(data, (list, tuple)):
        node.value = [_node(item, node, i) for i, item in enumerate(data)]
    return node


def _values(node: JsonNode) -> Any:
    if isinstance(node.value, dict):
        return {key: _values(item) for key, item in node.value.items()}
    return [_values(item) for item in node.value] if isinstance(node.value, list) else node.value


class _DescriptionReader:
    """A reader of values by their type hints."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, node: JsonNode, text: str, key: str = "", line: int = 0) -> NoReturn:
        message = node.located(self.path, text, line)
        message += "" if message[-1] in ".?" else "."
        key = ".".join(filter(None, (node.where, key)))
        raise ClusterError(message, path=self.path, line=line or node.line or None, key=key or None)

    def read(self, node: JsonNode, hint: Any) -> Any:
        origin, args, value = get_origin(hint), get_args(hint), node.value
        if hint == Groups and type(value) is int:
            return value
        if hint is Any:
            return _values(node)
        if origin in (Union, UnionType):
            if value is None and NoneType in args:
                return None
            return self.read(node, next(arg for arg in args if arg is not NoneType))
        if is_dataclass(hint) or (isinstance(value, dict) and hasattr(hint, "_fields")):
            return self._object(node, hint)
        if origin is dict:
            if not isinstance(value, dict):
                self.fail(node, "must be an object")
            return {self._key(node, key, args[0]): self.read(item, args[1]) for key, item in value.items()}
        if origin is tuple or (isinstance(hint, type) and issubclass(hint, tuple)):
            kinds = args or tuple(_hints(hint).values())
            is_long = Ellipsis in kinds
            if not isinstance(value, list) or not (is_long or len(value) == len(kinds)):
                self.fail(node, f"must be a list{'' if is_long else f' of {len(kinds)} values'}")
            each = (kinds[0],) * len(value) if is_long else kinds
            read = tuple(self.read(item, kind) for item, kind in zip(value, each, strict=True))
            return hint(*read) if hasattr(hint, "_fields") else read
        if hint is float and type(value) is int:
            return float(value)
        # 80e9, for a number of bytes.
        if hint is int and type(value) is float and value.is_integer():
            return int(value)
        if type(value) is not hint:
            self.fail(node, f"must be {_NAMES[hint]}, not {shown(value)}")
        return value

    def _key(self, node: JsonNode, text: str, hint: Any) -> Any:
        if hint is str:
            return text
        parts = text.split("-")
        if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts) or len(parts) > (
            1 if hint is int else 2
        ):
            pair = "" if hint is int else ', or two, such as "0-3"'
            self.fail(node, f'key "{text[:40]}" must be a number such as "4"{pair}', line=node.value[text].line)
        numbers = tuple(map(int, parts))
        return numbers if len(numbers) == 2 else numbers[0]

    def _object(self, node: JsonNode, kind: Any) -> Any:
        if not isinstance(node.value, dict):
            self.fail(node, f"must be an object, not {shown(node.value)}")
        known = {name: each.default is each.empty for name, each in _signature(kind).parameters.items()}
        for key, item in node.value.items():
            if key not in known:
                hint = did_you_mean(key, known) or f" Known are {', '.join(known)}."
                self.fail(node, f'unknown key "{key[:40]}".{hint}', key, item.line)
        for key, is_needed in known.items():
            if is_needed and key not in node.value:
                self.fail(node, f'"{key}" is missing', key)
        hints = _hints(kind)
        values = {key: self.read(item, hints[key]) for key, item in node.value.items()}
        try:
            return kind(**values)
        except ClusterError as error:
            # Errors of nested descriptions name their place already.
            if "path" in error.facts:
                raise
            key = str(error.facts.get("key", ""))
            self.fail(node, str(error), key, node.value.get(key, node).line)


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


# --- tables --------------------------------------------------------------------------------------


def table(cluster: Any) -> str:
    """Return the numbers of a cluster as a table, each with its source; a number without one is assumed."""
    specs = {"device": cluster.device, "link": cluster.link, "node_link": cluster.node_link}
    specs |= {tier.name: tier.link for tier in cluster.tiers} | {"library": cluster.library}
    specs |= {f"{op} of {count}": by[count] for op, by in cluster.measured.items() for count in by}
    rows = [row for name, spec in specs.items() if spec for row in _rows(name, spec)]
    if cluster.sharing:
        kind = "measured" if cluster.calibration else "assumed"
        rows.append(("cluster", "sharing", _number("sharing", cluster.sharing), kind))
    for name in ("dtype", "rules", "stragglers", "slow_links", "jitter"):
        if (found := getattr(cluster, name)) and found != "float32":
            rows.append(("cluster", name, f"{found}", "assumed"))
    counts = [format_number_of(cluster.world_size, "rank"), format_number_of(len(cluster.nodes), "node")]
    head = f"{cluster.name}: {', '.join([*counts, *(f'{len(tier.groups)} x {tier.name}' for tier in cluster.tiers)])}"
    return "\n".join([head, *aligned(rows)])


def _rows(name: str, spec: Any) -> list[tuple[str, str, str, str]]:
    rows = []
    for each in fields(spec):
        value, source = getattr(spec, each.name), spec.sources.get(each.name, "assumed")
        if each.name in ("name", "notes", "sources") or value in (None, (), {}) or value == each.default:
            continue
        numbers = (
            {f"{each.name}[{key}]": item for key, item in value.items()}
            if isinstance(value, dict)
            else {each.name: value}
        )
        rows += [(name, field, _number(each.name, number), source) for field, number in numbers.items()]
    notes = getattr(spec, "notes", "")
    return rows + [(name, "notes", "", notes)] * bool(notes)


def _number(name: str, value: Any) -> str:
    if name == "segments":
        return ", ".join(f"from {format_bytes(a)} {format_seconds(b)} {format_bytes(c)}/s" for a, b, c in value)
    if hasattr(value, "shapes"):
        work = f"{format_seconds(value.launch_s)} + {value.s_per_flop:.3g} s/flop + {value.s_per_byte:.3g} s/B"
        work += f" + {value.s_per_result:.3g} s/result"
        return f"{work}, corrected by {len(value.shapes)} shapes"
    if hasattr(value, "points"):
        return ", ".join(f"{fraction:g} at {size:g}" for size, fraction in value.points)
    if name.endswith("flops_per_s"):
        return format_count(value, "flop/s")
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_s"):
        return format_seconds(value)
    if isinstance(value, tuple):
        return ", ".join(value)
    return format_bytes(value) if name.endswith("_bytes") else f"{value}"
