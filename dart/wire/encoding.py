"""Protobuf's encoding of one field, for messages that are put together from parts encoded before.

By definition of the encoding, concatenated messages parse as one, with their lists concatenated. Protobuf itself would
copy each part when it is added to a message, and once more when that is encoded.

The encoding: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

from google.protobuf.message import Message

_LENGTH_DELIMITED = 2


def tag_of(message: type[Message], field: str) -> bytes:
    """What stands before a field that is a message or bytes, and before each entry of a list of them."""
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


def field_of(tag: bytes, encoded: bytes) -> bytes:
    """A message that has only the field of `tag_of`: this message, or a list with it as the only entry."""
    return b"".join((tag, varint(len(encoded)), encoded))


def varint(number: int) -> bytes:
    """A number with seven bits per byte, lowest first; a byte's top bit says that more follow."""
    if number < 0x80:
        return _SHORT[number]
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


_SHORT = [bytes([number]) for number in range(0x80)]
