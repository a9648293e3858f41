"""HCCL's rules for groups of cards of Ascend 910 servers. Source: MindSpore r0.2, tutorial of distributed training."""

from collections.abc import Iterable, Sequence

from simparallel.base.units import format_numbers

# The cards 0–3 and 4–7 of a server are two rings.
SIZES, RING, SERVER = (1, 2, 4, 8), 4, 8


def broken_rule(cards: Sequence[int], is_several: bool) -> str:
    """Return the rule that a group breaks with these cards of a server, and a way out; "" if it breaks none.

    Args:
        cards: numbers of the cards on their server.
        is_several: whether the group is a cluster of several servers.
    """
    if is_several and len(cards) != SERVER:
        return f"a cluster of several servers needs all {SERVER} cards of each; choose a multiple of 8 ranks"
    if len(cards) not in SIZES:
        return "a group has 1, 2, 4 or 8 cards of a server; choose another number of ranks"
    if len(cards) < SERVER and len({card // RING for card in cards}) > 1:
        return "cards 0–3 and 4–7 are two rings, and a group of 2 or 4 must be inside one; choose cards of one"
    return ""


def flaw_of(servers: Iterable[tuple[object, Iterable[int]]]) -> str:
    """Return a sentence about the first server that breaks a rule; "" if none does.

    Args:
        servers: (name, numbers of its cards) of each server of a cluster.
    """
    found = [(name, sorted(cards)) for name, cards in servers]
    for name, cards in found:
        if rule := broken_rule(cards, len(found) > 1):
            return f"server {name} has cards {format_numbers(cards)}. HCCL: {rule}"
    return ""
