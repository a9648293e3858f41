"""Actions of a pipeline: the work of a rank on one micro-batch at one stage."""

from __future__ import annotations

import re
from typing import NamedTuple

from simparallel.errors import ScheduleError

# Forward, input gradient, weight gradient, and both gradients at once.
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, BACKWARD = KINDS = "F", "I", "W", "B"
_ACTION = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
# PyTorch writes an overlapped pair as (3F7;4B3)OVERLAP_F_B.
_PAIR = re.compile(rf"\(({_ACTION.pattern})[+;]({_ACTION.pattern})\)(OVERLAP_F_B)?")


class Action(NamedTuple):
    """An action of a rank: the stage, the kind ("F", "I", "W", "B") and the micro-batch; "2F0" as text."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# An action, or a forward and a backward that may overlap.
Cell = tuple[Action, ...]


def cell_text(cell: Cell) -> str:
    """Return a cell as text: "0F0", or "(0F7+7B3)" for an overlapped pair."""
    return str(cell[0]) if len(cell) == 1 else f"({'+'.join(map(str, cell))})"


def read_cell(text: str, where: str) -> Cell:
    """Return the cell of a text; pairs may be in PyTorch's notation, too.

    Raises:
        ScheduleError: the text is not a cell.
    """
    found = _ACTION.fullmatch(text)
    if found:
        return (_action(*found.groups()),)
    found = _PAIR.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"{where}: {text!r} is not an action. Actions are a stage, a kind (F, I, W or B) and a micro-batch, such "
            "as '0F0', or a pair that may overlap, such as '(0F7+7B3)'."
        )
    _, *first, _, s, k, m, _ = found.groups()
    return _action(*first), _action(s, k, m)


def _action(stage: str, kind: str, microbatch: str) -> Action:
    return Action(int(stage), kind, int(microbatch))
