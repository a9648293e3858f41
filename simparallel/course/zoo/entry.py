"""A wrong program, its mended form, and the run that finds the mistake.

One function holds both programs: a line that ends in `# -` belongs to the wrong program only, and the code of a comment
`# + code` to the mended one only. Both texts are compiled, so that errors name the lines that readers see. The
docstring has the title of the mistake, its symptom if nothing checks the program, and the behaviour of other systems.
"""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from traceback import format_exception_only
from typing import Any

import simparallel as sp
from simparallel import testing
from simparallel.backend import random_state
from simparallel.errors import NotEquivalentError, RunFailedError

_HEAD = """\
import numpy as np

import simparallel as sp
from simparallel.course.zoo.given import LABELS, X, Y


"""

_DOCSTRING = re.compile(r' {4}"""[\s\S]*?"""\n')
# How long a rank waits for another one, in seconds.
TIMEOUT_S = 3.0
ENTRIES: dict[str, WrongProgram] = {}


@dataclass(frozen=True)
class Finding:
    """A mistake that a run has shown.

    Attributes:
        error: of `assert_equivalent`, or of the rank that failed first; a warning counts as an error.
        text: the message that the user reads, without the traceback.
    """

    error: BaseException
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(eq=False, repr=False)
class WrongProgram:
    """A wrong program and the description of its mistake. It is called on each rank, without arguments.

    Attributes:
        name, title: name of the program, and title of its mistake.
        category: the module of `simparallel.course.zoo.programs` that contains it.
        function: both programs, as marked lines.
        lesson: number of the lesson that it belongs to.
        seen: the symptom if nothing checks the program.
        elsewhere: the behaviour of other systems.
        says: part of the text of the finding.
        raises: the error of the run; None if the run succeeds and `assert_equivalent` finds a difference.
        world_size: number of ranks.
    """

    name: str
    title: str
    category: str
    function: Callable[[], Any]
    lesson: int
    seen: str
    elsewhere: str
    says: str
    raises: type[BaseException] | None = None
    world_size: int = 2

    @cached_property
    def diff(self) -> str:
        """Both programs: lines of the wrong one only begin with -, those of the mended one only with +."""
        source = inspect.getsource(self.function)
        marked = _DOCSTRING.sub("", source[source.index("\ndef ") + 1 :], count=1)
        return "".join(map(_diff_line, marked.splitlines(True)))

    @cached_property
    def source(self) -> str:
        """The text of the wrong program, a whole file."""
        return _HEAD + _without("+", self.diff)

    @cached_property
    def mended_source(self) -> str:
        """The text of the mended program, a whole file."""
        return _HEAD + _without("-", self.diff)

    @cached_property
    def program(self) -> Callable[[], Any]:
        """The wrong program; errors name the lines of `source`."""
        return self._compiled(self.source, f"{self.name}.py")

    @cached_property
    def mended(self) -> Callable[[], Any]:
        """The mended program; errors name the lines of `mended_source`."""
        return self._compiled(self.mended_source, f"{self.name}_mended.py")

    @property
    def found_by(self) -> str:
        """How the mistake is found: "the run" or "assert_equivalent"."""
        return "assert_equivalent" if self.raises is None else "the run"

    @cached_property
    def told(self) -> str:
        """The text of the finding of the wrong program, which runs at the first access."""
        return str(self.find())

    def launch(self, program: Callable[[], Any]) -> sp.Results:
        """Run a program on `world_size` ranks that are threads, from the seed 0."""
        before = random_state.snapshot()
        # The finding and its place may depend on the initial weights.
        sp.manual_seed(0)
        try:
            return sp.launch(program, world_size=self.world_size, transport="inline", timeout_s=TIMEOUT_S)
        finally:
            random_state.restore(before)

    def find(self, program: Callable[[], Any] | None = None) -> Finding | None:
        """Run a program so that this mistake is found: alone, or with `assert_equivalent`.

        Args:
            program: by default the wrong one.

        Returns:
            The finding; None if there is none. Any error of a rank is one.

        Cost: one or two runs on threads, milliseconds each.
        """
        program = self.program if program is None else program
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                if self.raises is None:
                    testing.assert_equivalent(program, world_size=self.world_size, timeout_s=TIMEOUT_S)
                else:
                    self.launch(program)
        except RunFailedError as error:
            return Finding(error.__cause__ or error, str(error).partition("\n\n")[0])
        except NotEquivalentError as error:
            return Finding(error, "".join(format_exception_only(error)).strip())
        return None

    def __repr__(self) -> str:
        return f"WrongProgram({self.name!r})"

    def __str__(self) -> str:
        sections = (("Seen", self.seen), (f"Found by {self.found_by}", self.told), ("Elsewhere", self.elsewhere))
        notes = "".join(f"\n{head}:\n{textwrap.indent(_wrapped(text), '  ')}\n" for head, text in sections)
        return f"{self.name}, lesson {self.lesson}: {self.title}.\n\n{self.diff}{notes}".rstrip()

    def _repr_html_(self) -> str:
        return (
            f"<h4>{escape(self.title)}</h4><pre>{escape(self.source)}</pre><p>{escape(self.seen)}</p>"
            f"<p>Found by {self.found_by}:</p><pre>{escape(self.told)}</pre><p>Elsewhere: {escape(self.elsewhere)}</p>"
        )

    def _compiled(self, source: str, file: str) -> Callable[[], Any]:
        # Tracebacks look for the lines here.
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        names: dict[str, Any] = {"__name__": self.name}
        exec(compile(source, file, "exec"), names)
        return names[self.name]


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 116, subsequent_indent="  ") for line in text.splitlines())


def _diff_line(line: str) -> str:
    """Return a line of a marked function as a line of the diff."""
    if added := re.fullmatch(r"( *)# \+ (.*\n)", line):
        return "+" + added[1] + added[2]
    if removed := re.fullmatch(r"(.*?)  # -\n", line):
        return "-" + removed[1] + "\n"
    return " " + line


def _without(mark: str, diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(True) if line[0] != mark)


def wrong(**fields: Any) -> Callable[[Callable[[], Any]], WrongProgram]:
    """Return a decorator that enters a function into the zoo, under its own name; for the fields see `WrongProgram`."""

    def enter(function: Callable[[], Any]) -> WrongProgram:
        name, category = function.__name__, function.__module__.rpartition(".")[2]
        # Under -OO there are no docstrings.
        texts = [" ".join(part.split()) for part in (function.__doc__ or ".\n\n\n\n").split("\n\n")]
        title, seen, elsewhere = texts[0].removesuffix("."), texts[1], texts[2].removeprefix("Elsewhere: ")
        ENTRIES[name] = WrongProgram(name, title, category, function, seen=seen, elsewhere=elsewhere, **fields)
        return ENTRIES[name]

    return enter
