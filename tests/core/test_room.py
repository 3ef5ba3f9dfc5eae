"""How many requests a replica takes at once."""

from __future__ import annotations

from dart.core.fleet.room import LEAST, WINDOW, Room


def test_as_many_as_the_cache_has_room_for() -> None:
    room = Room(tokens=100_000, most=16)
    for _ in range(LEAST - 1):
        room.used(15_000)
    assert (room.slots, room.reason) == (16, ""), "a few requests prove nothing"
    room.used(15_000)
    assert room.slots == 6
    assert room.reason == "its KV cache has room for 6 requests of 15,000 tokens, the recent mean"


def test_short_requests_make_room_again() -> None:
    room = Room(tokens=100_000, most=16)
    for _ in range(LEAST):
        room.used(15_000)
    for _ in range(WINDOW):
        room.used(5_000)
    assert (room.slots, room.reason) == (16, "")


def test_one_at_least_and_no_more_than_told() -> None:
    room, unknown = Room(tokens=1_000, most=4), Room(tokens=0, most=4)
    for _ in range(LEAST):
        room.used(1_200)
        unknown.used(1_200)
    assert (room.slots, unknown.slots) == (1, 4)
