"""Descriptions of other ranks' last calls, read from the headers that they left in shared memory.

Headers stay readable after a rank's death, so an error can tell where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import simparallel.comm.call_header as h
from simparallel.comm.memory.segment import RING, SharedSegment
from simparallel.errors import CommError, DeadlockError


def group_name(slot: int) -> str:
    return "world" if slot == 0 else f"group {slot}"


def last_call(segment: SharedSegment, rank: int, slot: int) -> tuple[int, str]:
    """Return (number, text with call site) of the last collective of a group that `rank` began; (0, "") for none."""
    # Of the two parities, the one with the higher number is the last call.
    words = max((segment.call_of(slot, parity, rank) for parity in (0, 1)), key=lambda words: words[h.SEQ])
    seq, site = words[h.SEQ], words[h.SITE]
    if seq == 0:
        return 0, ""
    place = f" at {segment.read_site(rank, site)}" if site else ""
    return seq, f"#{seq} {h.describe(words)}{place}"


def last_calls(segment: SharedSegment, rank: int) -> str:
    """Describe the last collective of `rank` in each of its groups."""
    found = [
        f"{group_name(slot)} {text}"
        for slot in range(segment.map.max_groups)
        for seq, text in [last_call(segment, rank, slot)]
        if seq
    ]
    if not found:
        return "it has started no collective"
    more = f" and {len(found) - 3} other groups" if len(found) > 3 else ""
    return "its last collectives: " + "; ".join(found[:3]) + more


def counts(segment: SharedSegment, slot: int, waiting: int, gone: int) -> str:
    """Compare the progress of two ranks in a group: `waiting` waits because `gone` has made fewer calls."""
    mine, _ = last_call(segment, waiting, slot)
    theirs, last = last_call(segment, gone, slot)
    name = group_name(slot)
    text = f"rank {waiting} has made {mine} collective call{'s' * (mine != 1)} in {name}, rank {gone} has made {theirs}"
    return f"{text}; the last of rank {gone} is {last}" if last else text


def stuck_ranks(waiting: Iterable[int], is_stuck: Callable[[int, set[int]], bool]) -> set[int]:
    """Return the largest set of waiting ranks that can never continue.

    Args:
        waiting: the ranks that wait.
        is_stuck: whether a rank can never continue if none of a set does.
    """
    # Ranks that another one may still release are removed until none is left to remove.
    stuck = set(waiting)
    while free := {rank for rank in stuck if not is_stuck(rank, stuck)}:
        stuck -= free
    return stuck


def deadlock_error(segment: SharedSegment, ranks: Sequence[int]) -> DeadlockError:
    """Build the error for ranks that wait for each other; the same on each of them."""
    waiting = {rank: segment.read_wait(rank) for rank in ranks}
    return error_of(waiting, segment.world_size)


def error_of(waiting: dict[int, str], world_size: int) -> DeadlockError:
    """Build the error from the descriptions of all waits."""
    if len(waiting) == world_size:
        who = "every rank waits for another one, so none can continue"
    elif len(waiting) == 1:
        who = f"rank {next(iter(waiting))} waits for itself"
    else:
        who = f"ranks {', '.join(map(str, waiting))} wait for each other, so none of them can continue"
    details = "\n".join(f"  rank {rank} waits in {text}" for rank, text in waiting.items())
    return DeadlockError(
        f"{who}:\n{details}\nAll ranks of a group must make the same calls in the same order; every recv needs a send.",
        waiting=waiting,
    )


def unreceived(segment: SharedSegment, kept: dict[int, list[tuple[int, str]]]) -> dict[int, CommError]:
    """Return receiver -> error for messages that were sent to it and never received. Only when all ranks have ended.

    Args:
        segment: has the messages that are still in the rings.
        kept: receiver -> (sender, text) of each message that was taken out of a ring but matched no receive's tag.
    """
    words, control, ranks = segment.words, segment.map, segment.ranks
    errors = {}
    for dst in ranks:
        left = list(kept.get(dst, ()))
        for src in ranks:
            # Messages between the two numbers are still in the ring.
            first, last = words[control.taken(dst, src)], words[control.sent(src, dst)]
            for number in range(max(first, last - RING), last):
                start = control.message(src, dst, number)
                left.append((src, message_text(segment, src, words[start : start + h.USED])))
        if left:
            details = "".join(f"\n  rank {src} sent {text}" for src, text in left[:20])
            more = f"\n  and {len(left) - 20} more" if len(left) > 20 else ""
            errors[dst] = CommError(
                f"rank {dst} ended without receiving {len(left)} message{'s' * (len(left) > 1)}:{details}{more}\n"
                "Every send needs a recv with the same tag on the other side.",
                rank=dst,
                senders=sorted({src for src, _ in left}),
            )
    return errors


def message_text(segment: SharedSegment, src: int, header: Sequence[int]) -> str:
    """Describe a message: array, tag, call site."""
    site = header[h.SITE]
    place = f" at {segment.read_site(src, site)}" if site else ""
    return f"{h.describe(header)[5:]} with tag {header[h.TAG]}{place}"
