"""Signatures as text: annotations as the source has them, and defaults that can be read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any


def signature_of(thing: Any, *, is_method: bool = False) -> str:
    """Return the signature of a function or class; of a method without `self`."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "()"
    parameters = list(signature.parameters.values())[is_method:]
    hides = signature.return_annotation is signature.empty or inspect.isclass(thing)
    returned = "" if hides else f" -> {_annotation(signature.return_annotation)}"
    return f"({', '.join(_parts(parameters))}){returned}"


def _parts(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Yield the parameters and the marks `/` and `*` between them."""
    kinds = [parameter.kind for parameter in parameters]
    for i, parameter in enumerate(parameters):
        before = kinds[i - 1] if i else None
        if before is parameter.POSITIONAL_ONLY and parameter.kind is not before:
            yield "/"
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (parameter.VAR_POSITIONAL, parameter.kind):
            yield "*"
        yield _parameter(parameter)
    if kinds and kinds[-1] is inspect.Parameter.POSITIONAL_ONLY:
        yield "/"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {_default(parameter.default)}"


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if hasattr(annotation, "__forward_arg__"):  # of a NamedTuple
        return str(annotation.__forward_arg__)
    return annotation.__name__ if inspect.isclass(annotation) else re.sub(r"\b(?:\w+\.)+", "", repr(annotation))


def _default(value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    text = repr(value)
    return "..." if text.startswith("<") or len(text) > 60 else text
