"""Traces as Chakra execution traces, one file for each rank, for simulators such as ASTRA-sim.

A node is an operation. It depends on the node before it on its stream. A communication also depends on the last
computation that had ended when it started; a computation that started later than its stream was free also depends on
the communications that ended at its start. A simulator finds the waits between ranks itself, from the collectives and
the messages.

The format: Chakra schema 0.0.4 (MLCommons, `schema/protobuf/et_def.proto`): messages of Protocol Buffers, each after
its length. Only the fields that are written are declared here; to readers the others are unset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from io import BytesIO
from typing import Any

from simparallel.clock.event import COMPUTE, RANGE, Event
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec

VERSION = "0.0.4"
PS_PER_US = 10**6
# Values of the enums NodeType and CollectiveCommType.
COMPUTE_NODE, SEND_NODE, RECEIVE_NODE, COLLECTIVE_NODE = 4, 5, 6, 7
COLLECTIVES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5, "all_to_all": 6,
    "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
# Message -> (field, number, type, is repeated); types are those of FieldDescriptorProto, or messages.
_MESSAGES: dict[str, tuple[tuple[str, int, str, bool], ...]] = {
    "Int64List": (("values", 1, "INT64", True),),
    "AttributeProto": (
        ("name", 1, "STRING", False),
        ("int64_val", 9, "INT64", False),
        ("int64_list", 10, "Int64List", False),
        ("bool_val", 27, "BOOL", False),
        ("string_val", 29, "STRING", False),
    ),
    "GlobalMetadata": (("version", 1, "STRING", False), ("attr", 2, "AttributeProto", True)),
    "Node": (
        ("id", 1, "UINT64", False),
        ("name", 2, "STRING", False),
        ("type", 3, "INT32", False),  # an enum, which is written as an int32
        ("data_deps", 5, "UINT64", True),
        ("start_time_micros", 6, "UINT64", False),
        ("duration_micros", 7, "UINT64", False),
        ("attr", 10, "AttributeProto", True),
    ),
}


def file_name(rank: int) -> str:
    """Return the name of a rank's file, as ASTRA-sim expects it."""
    return f"trace.{rank}.et"


@cache
def messages() -> dict[str, Any]:
    """Return the classes of the messages.

    Raises:
        InputError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise InputError(
            'chakra: these files are written with protobuf, which is not installed: pip install "simparallel[chakra]".'
        ) from error
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="chakra.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        is_attribute = message == "AttributeProto"
        if is_attribute:
            described.oneof_decl.add(name="value")
        for name, number, kind, is_repeated in fields:
            field = described.field.add(name=name, number=number)
            field.label = kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL
            field.type = kinds.TYPE_MESSAGE if kind in _MESSAGES else getattr(kinds, f"TYPE_{kind}")
            if kind in _MESSAGES:
                field.type_name = f".ChakraProtoMsg.{kind}"
            if is_attribute and name != "name":
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in _MESSAGES
    }


def dumps(events: Sequence[Event], cluster: ClusterSpec, rank: int) -> bytes:
    """Return the bytes of one rank's file, in simulated time; `events` are the rank's own.

    Raises:
        InputError: protobuf is not installed.
    """
    found = messages()
    from google.protobuf import proto

    head = found["GlobalMetadata"](version=VERSION, attr=_attributes({"rank": rank, "device": cluster.device.name}))
    file = BytesIO()
    for message in (head, *_nodes(events)):
        proto.serialize_length_prefixed(message, file)
    return file.getvalue()


def _nodes(events: Sequence[Event]) -> Iterator[Any]:
    node = messages()["Node"]
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
        yield node(
            id=number,
            name=event.name,
            type=kind,
            data_deps=sorted(before),
            start_time_micros=event.sim_start_ps // PS_PER_US,
            # Chakra counts microseconds; the exact time is an attribute.
            duration_micros=-(-(event.sim_end_ps - event.sim_start_ps) // PS_PER_US),
            attr=_attributes({**attributes, "duration_ps": event.sim_end_ps - event.sim_start_ps}),
        )


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


def _attributes(values: dict[str, Any]) -> Iterable[Any]:
    found = messages()
    attribute, numbers = found["AttributeProto"], found["Int64List"]
    fields = {bool: "bool_val", int: "int64_val", str: "string_val"}
    for name, value in values.items():
        field = fields.get(type(value), "int64_list")
        yield attribute(name=name, **{field: numbers(values=value) if field == "int64_list" else value})
