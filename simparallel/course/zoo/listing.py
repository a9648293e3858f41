"""All programs of the zoo, by lesson; and a check of programs that others have mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simparallel as sp
from simparallel import testing
from simparallel.base.names import find
from simparallel.base.text_table import aligned
from simparallel.course.zoo.entry import ENTRIES, WrongProgram
from simparallel.course.zoo.programs import batches, calls, gradients, messages, pipelines, slices, states  # noqa: F401
from simparallel.errors import NotEquivalentError


def names() -> list[str]:
    """Return the names of all programs, in the order of their lessons."""
    return [entry.name for entry in sorted(ENTRIES.values(), key=lambda entry: entry.lesson)]


def get(name: str) -> WrongProgram:
    """Return the program of this name.

    Raises:
        UnknownNameError: there is no such program.
    """
    return find(ENTRIES, name, "zoo", "program")


def table() -> str:
    """Return a table of all programs: lesson, name, how the mistake is found, and the mistake."""
    rows = [("lesson", "name", "found by", "mistake")]
    rows += [(str(entry.lesson), entry.name, entry.found_by, entry.title) for entry in map(get, names())]
    return "\n".join(aligned(rows, "><"))


def check(name: str, program: Callable[[], Any]) -> None:
    """Check that a program is a mended form of the wrong program of this name.

    It must lead to no finding, and return the same values on each rank as the mended program.

    Args:
        name: name of the wrong program.
        program: your function; it is called on each rank.

    Raises:
        UnknownNameError: there is no such program.
        AssertionError: the mistake is found in your program, or it returns something else.

    Cost: some runs on threads, milliseconds each.
    """
    entry = get(name)
    finding = entry.find(program)
    if finding is not None:
        raise AssertionError(f"{name}: your program has a mistake still.\n{finding}")
    expected, got = (list(entry.launch(function)) for function in (entry.mended, program))
    try:
        # Both runs return results of all ranks: the run on one rank the expected ones, the run on two those to check.
        testing.assert_equivalent(lambda: got if sp.get_world_size() > 1 else expected, world_size=2)
    except NotEquivalentError as error:
        raise AssertionError(
            f"{name}: the mistake is gone, but your program returns something else than the mended one: "
            f"{error.facts['name'] or 'the result'} is {error.facts['value']}, expected {error.facts['expected']}."
        ) from None
