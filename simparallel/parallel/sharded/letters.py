"""ZeRO as three letters: where the parameters, the gradients and the optimizer state of a group are.

    R  replicated: every rank has all of it        P  partial: an addend on every rank, summed when it is needed
    S  sharded: every rank has its slice

    parameter gradient state
        R        P       R    DistributedDataParallel
        R        P       S    ZeRO-1
        R        S       S    ZeRO-2
        S        S       S    ZeRO-3, FSDP

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.
"""

from __future__ import annotations

from typing import NamedTuple

from simparallel.errors import InputError

NAMES = {"RPR": "DistributedDataParallel", "RPS": "ZeRO-1", "RSS": "ZeRO-2", "SSS": "ZeRO-3"}


class Letters(NamedTuple):
    """Where parameters, gradients and optimizer state are: "R", "P" or "S" each."""

    parameter: str
    gradient: str
    state: str

    @classmethod
    def checked(cls, parameter: str, gradient: str, state: str) -> Letters:
        """Return the letters. Raise InputError, with the reason, for a combination that no training step can have."""
        letters = cls(parameter, gradient, state)
        for name, letter in zip(cls._fields, letters, strict=True):
            if letter not in ("R", "P", "S"):
                raise InputError(
                    f"fully_shard: {name}={letter!r} must be 'R' (replicated), 'P' (partial, gradients only) or 'S' "
                    "(sharded)."
                )
        text = "".join(letters)
        if text not in NAMES:
            known = ", ".join(f"{' '.join(each)} ({name})" for each, name in NAMES.items())
            raise InputError(f"fully_shard: {' '.join(letters)}: {_reason(letters)} Take one of {known}.")
        return letters

    @property
    def shards_state(self) -> bool:
        """Whether a rank updates only its slices of the parameters."""
        return self.state == "S"

    @property
    def keeps_whole(self) -> bool:
        """Whether every rank keeps the whole parameters from step to step."""
        return self.parameter == "R"


def _reason(letters: Letters) -> str:
    """Return why no training step has these letters."""
    if "P" in (letters.parameter, letters.state):
        return "only a gradient is a sum that may be left unfinished; a parameter and its state are values."
    if letters.gradient == "R":
        return (
            "a gradient is read where the state is, and nowhere else: with a replicated state its addends are summed "
            "for all ranks ('P'), with a sharded one for the rank that updates the slice ('S')."
        )
    if letters.state == "R":
        return "a rank that has a slice of the parameter or of its gradient can update only this slice: state='S'."
    return "whole gradients would outlive the whole parameters that they belong to; they are 'S' where parameters are."
