"""Explanations of a plan: the cost of an op's strategy, those of the alternatives, and the data that it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from simparallel.base.html import table
from simparallel.base.text_table import aligned
from simparallel.base.units import format_seconds

Cuts = tuple[tuple[int, ...], ...]


class Option(NamedTuple):
    """A strategy of an op, and the parts of its cost while all other ops keep the strategies of the plan.

    Attributes:
        in_strategy, out_strategy: the arguments of `shard`; None for an op that runs as the program says.
        compute_ps: forward, backward, and the optimizers' work for its parameters [ps].
        exchange_ps: collectives and messages that its ranks wait for [ps].
        sums_ps: sums of parameters' gradients [ps]: the share that is not hidden behind backward.
        redistribution_ps: redistributions from and to its neighbours [ps], forward and backward.
    """

    in_strategy: Cuts | None
    out_strategy: tuple[int, ...] | None
    compute_ps: int
    exchange_ps: int
    sums_ps: int
    redistribution_ps: int

    @property
    def cost_ps(self) -> int:
        return self.compute_ps + self.exchange_ps + self.sums_ps + self.redistribution_ps


class Move(NamedTuple):
    """The redistribution of an input.

    Attributes:
        input: its number.
        source: the call that makes it, or "argument", "parameter", "constant".
        forward, backward: the collectives; "" for none, "slice" if no data is exchanged.
        cost_ps: of both [ps].
    """

    input: int
    source: str
    forward: str
    backward: str
    cost_ps: int

    def __str__(self) -> str:
        passes = {"forward": self.forward, "backward": self.backward}
        exchanges = ", ".join(f"{phase} {text}" for phase, text in passes.items() if text)
        return f"input {self.input}, from {self.source}: {exchanges}; {format_seconds(self.cost_ps / 1e12)}"


@dataclass(frozen=True, repr=False)
class Explanation:
    """The cost of a call's strategy, beside the costs of the alternatives.

    Attributes:
        title: name, shapes and line of the call.
        options: the strategy of the plan, then the next best ones.
        moves: redistributions of its inputs.
    """

    title: str
    options: tuple[Option, ...]
    moves: tuple[Move, ...]

    @property
    def chosen(self) -> Option:
        return self.options[0]

    @property
    def second(self) -> Option | None:
        """The best alternative; None if there is none."""
        return self.options[1] if len(self.options) > 1 else None

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("", "strategy", "cost", "compute", "exchanges", "sums of gradients", "redistributions")
        ]
        for number, option in enumerate(self.options):
            rank = "chosen" if number == 0 else f"{number + 1}. best"
            parts = (option.cost_ps, *option[2:])
            times = [format_seconds(ps / 1e12) if ps else "-" for ps in parts]
            rows.append((rank, strategy_text(*option[:2]), *times))
        return rows

    def _moves(self) -> list[str]:
        return list(map(str, self.moves)) or ["no input is redistributed"]

    def __repr__(self) -> str:
        lines = [
            f"{self.title}; beside the strategies of all other ops:",
            *aligned(self._rows(), "<<>"),
            *self._moves(),
        ]
        return "\n  ".join(lines)

    def _repr_html_(self) -> str:
        """Return the choices as an HTML table, for notebooks."""
        return table(self._rows(), title=self.title, notes=self._moves(), left=True)


def strategy_text(in_strategy: Any, out_strategy: Any) -> str:
    """Return a strategy as text."""
    if in_strategy is None:
        return "as the program says"
    if all(cut == 1 for entry in in_strategy for cut in entry) and out_strategy is None:
        return "whole on every device"
    return f"{in_strategy!r}{'' if out_strategy is None else f' -> {out_strategy!r}'}"
