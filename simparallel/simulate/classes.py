"""Folding: ranks that do the same at the same times are simulated once.

Ranks are of one class if they run the same program, and their groups have the same numbers of members of each class. So
all of a class wait for the same, and one program stands for them: the times of the folded programs are those of all
ranks, exactly, as long as no link is shared. A slow rank has a colour of its own, and so there are more classes.

The classes are the coarsest equitable partition, found by colour refinement (Weisfeiler and Leman 1968; Berkholz,
Bonsma and Grohe 2017, "Tight lower and upper bounds for the complexity of canonical colour refinement").
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simparallel.errors import InputError
from simparallel.simulate.program import COLLECTIVE, Call, Program


class Family(NamedTuple):
    """Groups of one kind and size, such as those along an axis of a mesh.

    Attributes:
        ranks: members of each group, integers, shape (groups, size).
        is_ordered: whether the position in a group matters, as it does for sender and receiver.
        colours: further differences between groups, such as their links; integers, shape (groups,). None for nothing.
    """

    ranks: np.ndarray
    is_ordered: bool = False
    colours: np.ndarray | None = None


def refine(colours: np.ndarray, families: Sequence[Family]) -> np.ndarray:
    """Return the class of each rank, int64, shape (ranks,), numbered by their first ranks.

    Args:
        colours: differences between the ranks themselves, such as program, device and speed; integers, shape (ranks,).
        families: all groups, and all channels of messages, as ordered pairs.

    Cost: at most one round for each class, of 0.1 us for each rank and member of a group. Classes are compared by
        hashes of 64 bits.
    """
    classes = _numbered(np.asarray(colours))
    while True:
        own = _mixed(classes)
        found = own.copy()
        for number, (ranks, is_ordered, group_colours) in enumerate(families):
            place = np.arange(ranks.shape[1]) if is_ordered else 0
            # Sums do not depend on the order of the members.
            group = (_mixed(own[ranks], place) if is_ordered else own[ranks]).sum(axis=1, dtype=np.uint64)
            group = _mixed(group, 0 if group_colours is None else group_colours, number)
            np.add.at(found, ranks, _mixed(group[:, None], place) if is_ordered else group[:, None])
        finer = _numbered(found)
        if finer.max(initial=0) == classes.max(initial=0):
            return classes
        classes = finer


def _numbered(values: np.ndarray) -> np.ndarray:
    """Return numbers 0, 1, … of the values, in the order of their first occurrence; equal values have equal ones."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse]


def _mixed(*values: np.ndarray | int) -> np.ndarray:
    """Return a hash of the values, element by element, uint64 (the finaliser of SplitMix64, Steele et al. 2014)."""
    x: np.ndarray = np.zeros(1, np.uint64)
    for value in values:
        x = x + np.asarray(value).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x


def fold(
    programs: Sequence[Program],
    classes: np.ndarray,
    groups: Mapping[Hashable, Sequence[int]],
    family: Callable[[Hashable], Hashable] = lambda key: None,
) -> tuple[list[Program], dict[Hashable, list[int]]]:
    """Return programs of classes of ranks, and the groups of classes, as arguments of `task_graph`.

    Args:
        programs: class -> program of one of its ranks.
        classes: rank -> class, as `refine` returns it.
        groups: key -> ranks of each group that the programs name; (sender, receiver) of each channel.
        family: key of a group -> name of its family.

    Raises:
        InputError: a program has two groups of one family whose members are of the same classes.
    """
    new_keys: dict[tuple[str, Hashable], Hashable] = {}
    new_groups: dict[Hashable, list[int]] = {}

    def renamed(call: Call) -> Hashable:
        """Return the key of the folded group: that of all groups of the same family and classes."""
        key = new_keys.get((call.kind, call.group))
        if key is None:
            members = classes[np.asarray(groups[call.group])]
            found, counts = np.unique(members, return_counts=True)
            is_group = call.kind == COLLECTIVE
            shown = tuple(zip(found.tolist(), counts.tolist(), strict=True)) if is_group else tuple(members.tolist())
            key = new_keys[call.kind, call.group] = family(call.group), shown
            new_groups[key] = found.tolist()
        return key

    folded = []
    for program in programs:
        new = Program(program.name)
        old_keys: dict[tuple[str, Hashable], Hashable] = {}
        for action in program.actions:
            call = action.call
            if call is not None:
                key = renamed(call)
                other = old_keys.setdefault((call.kind, key), call.group)
                if other != call.group:
                    raise InputError(
                        f"{program.name}: groups {other!r} and {call.group!r} cannot be told apart, as their members "
                        "are of the same classes. Give them different families."
                    )
                action = action._replace(call=call._replace(group=key))
            new.actions.append(action)
        folded.append(new)
    return folded, new_groups
