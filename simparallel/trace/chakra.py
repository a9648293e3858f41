"""Traces as Chakra execution traces, one file for each rank, for simulators such as ASTRA-sim.

A node is an operation. It depends on the node before it on its stream. A communication also depends on the last
computation that had ended when it started; a computation that started later than its stream was free also depends on
the communications that ended at its start. A simulator finds the waits between ranks itself, from the collectives and
the messages.

The format: Chakra schema 0.0.4 (MLCommons, `schema/protobuf/et_def.proto`): messages of Protocol Buffers, each after
its length. Only the fields that are written are named here; to readers the others are unset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from simparallel.clock.event import COMPUTE, RANGE, Event
from simparallel.machine.cluster import ClusterSpec

VERSION = "0.0.4"
PS_PER_US = 10**6
# Values of the enums NodeType and CollectiveCommType.
COMPUTE_NODE, SEND_NODE, RECEIVE_NODE, COLLECTIVE_NODE = 4, 5, 6, 7
COLLECTIVES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
    "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
# Numbers of the fields of Node, and of those of AttributeProto that hold a value, by its type.
ID, NAME, TYPE, DEPENDENCIES, START_US, DURATION_US, ATTRIBUTES = 1, 2, 3, 5, 6, 7, 10
VALUES = {int: 9, list: 10, bool: 27, str: 29}


def file_name(rank: int) -> str:
    """Return the name of a rank's file, as ASTRA-sim expects it."""
    return f"trace.{rank}.et"


def dumps(events: Sequence[Event], cluster: ClusterSpec, rank: int) -> bytes:
    """Return the bytes of one rank's file, in simulated time; `events` are the rank's own."""
    # GlobalMetadata: the version, and attributes.
    head = _message((1, VERSION), *_attributes(2, {"rank": rank, "device": cluster.device.name}))
    return b"".join(_varint(len(message)) + message for message in (head, *_nodes(events)))


def _message(*fields: tuple[int, Any]) -> bytes:
    """Encode a message of these (number, value): integers as varints, all else after its length.

    A value is an integer, a text, a list of integers, or the bytes of a message.
    """
    found = []
    for number, value in fields:
        if isinstance(value, int):
            found += [_varint(number << 3), _varint(value)]
        else:
            data = value.encode() if isinstance(value, str) else value
            data = b"".join(map(_varint, data)) if isinstance(data, list) else data
            found += [_varint(number << 3 | 2), _varint(len(data)), data]
    return b"".join(found)


@lru_cache(maxsize=4096)
def _varint(value: int) -> bytes:
    """Encode an integer of 64 bits in groups of 7, the lowest first; the top bit of a byte says that more follow."""
    value &= (1 << 64) - 1
    groups = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def _nodes(events: Sequence[Event]) -> Iterator[bytes]:
    """Yield the Node of each event but marks, in the order of their starts."""
    work = [event for event in events if event.kind != RANGE]
    work.sort(key=lambda event: (event.sim_start_ps, event.sim_end_ps))
    # Node -> the node before it on its stream. Numbers begin at 1: to proto3 readers, 0 means unset.
    previous: dict[int, int] = {}
    last: dict[tuple[int, str], int] = {}
    # (device, end) -> nodes that ended then.
    ended: dict[tuple[int, int], list[int]] = {}
    for number, event in enumerate(work, 1):
        lane = event.device, event.stream
        before = {last[lane]} if lane in last else set()
        if event.stream != COMPUTE:
            done = last.get((event.device, COMPUTE))
            # The last computation may still be running beside the communication.
            while done is not None and work[done - 1].sim_end_ps > event.sim_start_ps:
                done = previous.get(done)
            before |= set() if done is None else {done}
        elif not before or work[last[lane] - 1].sim_end_ps < event.sim_start_ps:
            before.update(ended.get((event.device, event.sim_start_ps), ()))
        if lane in last:
            previous[number] = last[lane]
        last[lane] = number
        ended.setdefault((event.device, event.sim_end_ps), []).append(number)
        kind, attributes = _kind_of(event)
        attributes |= {"is_cpu_op": False, "num_ops": event.flops, "tensor_size": event.size_bytes, "step": event.step}
        if event.layer:
            attributes["layer"] = event.layer
        duration_ps = event.sim_end_ps - event.sim_start_ps
        yield _message(
            (ID, number), (NAME, event.name), (TYPE, kind), (DEPENDENCIES, sorted(before)),
            # Chakra counts microseconds; the exact time is an attribute.
            (START_US, event.sim_start_ps // PS_PER_US), (DURATION_US, -(-duration_ps // PS_PER_US)),
            *_attributes(ATTRIBUTES, {**attributes, "duration_ps": duration_ps}),
        )  # fmt: skip


def _kind_of(event: Event) -> tuple[int, dict[str, Any]]:
    """Return the type of a node, and the attributes that only nodes of this type have."""
    if event.kind == "collective" and event.name in COLLECTIVES:
        return COLLECTIVE_NODE, {
            "comm_type": COLLECTIVES[event.name], "comm_size": event.size_bytes, "comm_group": list(event.group),
            "pg_name": event.stream.removeprefix("comm "),
        }  # fmt: skip
    if event.kind == "p2p":
        kind = RECEIVE_NODE if event.name == "recv" else SEND_NODE
        source, destination = event.group[0], event.group[-1]
        return kind, {
            "comm_src": source, "comm_dst": destination, "comm_size": event.size_bytes, "comm_tag": event.seq,
        }  # fmt: skip
    return COMPUTE_NODE, {}


def _attributes(field: int, values: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
    """Yield an AttributeProto for each name and value, with the number of the field that holds it."""
    for name, value in values.items():
        held = _message((1, value)) if isinstance(value, list) else value
        yield field, _message((1, name), (VALUES[type(value)], held))
