"""Helpers of the commands: a parser, lists, numbers checked under their option names, errors as exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from simparallel.base.names import did_you_mean
from simparallel.errors import InputError, RunFailedError, SimParallelError

# Options that similar tools have -> ours, for the hint.
_OTHER_WORDS = {
    "--device": "--cluster", "--np": "-n", "--png": "--picture", "--save": "--out", "-o": "--out", "--trace": "--out",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser that knows no abbreviations; its errors suggest a similar option, command or choice."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; unknown arguments are an error, also of a command below this parser, which shows its own usage."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = self._option_string_actions
            words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            meant = [_OTHER_WORDS[word] if _OTHER_WORDS.get(word) in known else word for word in words]
            hints = dict.fromkeys(did_you_mean(word, known) for word in meant)
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{''.join(hints)}".removesuffix("."))
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            error.message += f".{hint}" if hint else ""
            raise


def names(text: str) -> list[str]:
    """Split at commas: "a,b" -> ["a", "b"]."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[int]:
    """Parse integers between commas: "2,4,8" -> [2, 4, 8]."""
    return [_integer(name) for name in names(text)]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an integer; write integers between commas, such as 2,4,8"
        ) from None


def at_least_one(**options: int | None) -> None:
    """Check that numbers are at least 1: `at_least_one(epochs=0)` raises "--epochs 0: must be at least 1.".

    None means that the option was not given.

    Raises:
        InputError: a number is too small.
    """
    for name, value in options.items():
        if value is not None and value < 1:
            raise InputError(f"{flag(name)} {value}: must be at least 1.")


def positive(*, allow_infinity: bool = False, **options: float) -> None:
    """Check that numbers are above 0 and finite; with `allow_infinity`, inf is, too.

    Raises:
        InputError: a number is not above 0, or not finite.
    """
    for name, value in options.items():
        if not value > 0 or not (allow_infinity or isfinite(value)):
            more = " (inf for no limit)" if allow_infinity else ""
            raise InputError(f"{flag(name)} {value:g}: must be a number above 0{more}.")


def flag(name: str) -> str:
    """Return the option for a name: "n" -> "-n", "batch_size" -> "--batch-size"."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def exit_code(command: Callable[[], int | None]) -> int:
    """Run a command, print its error if it raises one, and return the exit code: 0 by default."""
    try:
        return command() or 0
    except RunFailedError as error:
        print(f"simparallel: {error}", file=sys.stderr)
        return int(error.facts["exit_code"])
    except SimParallelError as error:
        print(f"simparallel: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # An OSError, but no error of ours: the reader of a pipe, such as `head`, has closed it.
        raise
    except OSError as error:
        print(f"simparallel: {error.filename or 'error'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        # 130 is the shell's code for a process that SIGINT ended.
        lines = ["simparallel: interrupted; all ranks were stopped.", *getattr(error, "__notes__", ())]
        print("\n".join(lines), file=sys.stderr)
        return 130
