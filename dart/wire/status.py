"""`Status` ⇄ GetStatusResponse. Record and message use the same field names, so no table is needed.

The message repeats some figures at its top level, where programs older than `Figures` look for them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping

from google.protobuf.message import Message

from dart.core.status import Status
from dart.v1 import control_pb2 as cpb

Record = typing.TypeVar("Record")
_KNOWN: dict[type, dict[str, type]] = {}
"""Fields of the records converted so far: looking them up each time would take 50 µs for each worker."""


def status_to_proto(status: Status) -> cpb.GetStatusResponse:
    message = cpb.GetStatusResponse()
    _fill(message, status)
    counts, usage = status.figures.counts, status.figures.usage
    message.update, message.weight_version = counts.updates, counts.version
    message.trajectories, message.env_steps = counts.trajectories, counts.env_steps
    message.success_rate = status.figures.success_rate or 0.0
    message.fates.update(counts.fates)
    message.env_utilisation, message.rollout_utilisation = usage.env_utilisation, usage.rollout_utilisation
    message.trainer_utilisation = usage.trainer_utilisation
    message.trained_actions_per_minute = usage.trained_actions_per_minute
    return message


def status_from_proto(message: cpb.GetStatusResponse) -> Status:
    return _record(Status, message)


def _fill(message: Message, record: object) -> None:
    for name in _types(type(record)):
        value = getattr(record, name)
        if value is None:
            continue
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, tuple):
            into = getattr(message, name)
            for item in value:
                _fill(into.add(), item)
        elif dataclasses.is_dataclass(value):
            _fill(getattr(message, name), value)
        elif enum := message.DESCRIPTOR.fields_by_name[name].enum_type:
            setattr(message, name, enum.values_by_name[_prefix(enum.name) + value.upper()].number)
        else:
            setattr(message, name, value)


def _record(record: type[Record], message: Message) -> Record:
    fields: dict[str, object] = {}
    for name, kind in _types(record).items():
        value = getattr(message, name)
        if type(None) in typing.get_args(kind) and not message.HasField(name):
            fields[name] = None
        elif typing.get_origin(kind) is Mapping:
            fields[name] = dict(value)
        elif typing.get_origin(kind) is tuple:
            fields[name] = tuple([_record(typing.get_args(kind)[0], item) for item in value])
        elif dataclasses.is_dataclass(kind):
            fields[name] = _record(kind, value)
        elif enum := message.DESCRIPTOR.fields_by_name[name].enum_type:
            known = enum.values_by_number.get(value)
            fields[name] = known.name.removeprefix(_prefix(enum.name)).lower() if known else str(value)
        else:
            fields[name] = value
    return record(**fields)


def _types(record: type) -> dict[str, type]:
    """Field → its type, in order."""
    if record not in _KNOWN:
        hints = typing.get_type_hints(record)
        _KNOWN[record] = {field.name: hints[field.name] for field in dataclasses.fields(record)}
    return _KNOWN[record]


def _prefix(enum: str) -> str:
    """The prefix of an enum's value names: ROLE_ for Role."""
    return enum.upper() + "_"
