"""What goes out together is what waited together, in order, and any reader of the protocol can take it apart."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart.v1 import session_pb2 as pb
from dart.wire.encoding import varint
from dart.wire.outbox import FULL_BYTES, FULL_ENTRIES, MOST_ENTRIES, MalformedError, Outbox, messages, whole
from dart.wire.rules.table import MOST_BATCH


def observed(number: int, size: int = 0) -> pb.SessionRequest:
    message = pb.SessionRequest(observed=pb.Observed(assignment=pb.Assignment(assignment_id=str(number))))
    message.observed.image.data = bytes(size)
    return message


async def drained(box: Outbox[pb.SessionRequest]) -> list[tuple[pb.SessionRequest, bool]]:
    made = []
    while box:
        encoded, goodbye = await box.take()
        made.append((pb.SessionRequest.FromString(encoded), goodbye))
    return made


def each(message: pb.SessionRequest) -> list[pb.SessionRequest]:
    return list(messages(message.SerializeToString(), pb.SessionRequest))


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 127, 128, 300, 70_000, 600_000, FULL_BYTES]), min_size=1, max_size=40),
    st.booleans(),
)
def test_everything_arrives_once_and_in_order(sizes: list[int], batches: bool) -> None:
    async def run() -> None:
        box: Outbox[pb.SessionRequest] = Outbox(batches)
        sent = [observed(number, size) for number, size in enumerate(sizes)]
        for message in sent:
            box.put(message)
        received = [message for message, _ in await drained(box)]
        assert [one for message in received for one in each(message)] == sent
        for message in received:
            assert message.ByteSize() < FULL_BYTES + 1000, "a large message goes alone, whatever waits with it"
        if not batches:
            assert received == sent
        elif sum(sizes) + 40 * len(sizes) < FULL_BYTES:
            assert len(received) == 1

    asyncio.run(run())


async def test_a_batch_is_what_protobuf_would_have_written() -> None:
    box: Outbox[pb.SessionRequest] = Outbox(batches=True)
    sent = [observed(number, 200) for number in range(3)]
    for message in sent:
        box.put(message)
    encoded, _ = await box.take()
    assert encoded == pb.SessionRequest(batch=sent).SerializeToString()


@pytest.mark.parametrize("beside", [0, 2])
async def test_the_rest_of_a_body_is_sent_as_if_it_had_been_in_the_message(beside: int) -> None:
    box: Outbox[pb.SessionRequest] = Outbox(batches=True)
    reply = pb.Observed(instruction="buy milk", seconds=1.5)
    reply.image.data = bytes(300)
    message = pb.SessionRequest(observed=pb.Observed(assignment=pb.Assignment(assignment_id="a", sequence=3)))
    encoded = reply.SerializeToString()
    box.put(message, (encoded[:10], encoded[10:]))
    for number in range(beside):
        box.put(observed(number))
    data, _ = await box.take()
    expected = pb.SessionRequest(observed=reply)
    expected.observed.assignment.CopyFrom(message.observed.assignment)
    first, *others = messages(data, pb.SessionRequest)
    assert first == expected == whole(message, (encoded,))
    assert others == [observed(number) for number in range(beside)]


async def test_the_rest_of_a_body_counts_for_the_limit() -> None:
    refused: list[tuple[pb.SessionRequest, int]] = []
    box: Outbox[pb.SessionRequest] = Outbox(True, lambda message, size: refused.append((message, size)), limit=1000)
    message = observed(1)
    box.put(message, (pb.Observed(instruction="x" * 990).SerializeToString(),))
    box.put(observed(2))
    assert await box.take() == (observed(2).SerializeToString(), False)
    ((said, size),) = refused
    assert said is message
    assert size > 1000


async def test_one_message_is_no_batch() -> None:
    box: Outbox[pb.SessionRequest] = Outbox(batches=True)
    box.put(observed(1))
    assert await box.take() == (observed(1).SerializeToString(), False)


async def test_nothing_follows_a_goodbye_in_its_batch() -> None:
    box: Outbox[pb.SessionRequest] = Outbox(batches=True)
    for message in (observed(1), pb.SessionRequest(bye=pb.Bye()), observed(2)):
        box.put(message)
    (first, goodbye), (second, last) = await drained(box)
    assert [message.WhichOneof("body") for message in each(first)] == ["observed", "bye"]
    assert goodbye
    assert not last
    assert second == observed(2)


async def test_a_reader_that_waits_is_woken() -> None:
    box: Outbox[pb.SessionRequest] = Outbox(batches=True)
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(observed(1))
    box.put(observed(2))
    encoded, _ = await taking
    assert len(pb.SessionRequest.FromString(encoded).batch) == 2


def test_long_lengths_are_written_as_protobuf_writes_them() -> None:
    assert [varint(n).hex() for n in (0, 127, 128, 300, 1 << 20)] == ["00", "7f", "8001", "ac02", "808040"]


async def test_a_message_over_the_limit_is_told_and_the_rest_goes_on() -> None:
    refused: list[tuple[pb.SessionRequest, int]] = []
    box: Outbox[pb.SessionRequest] = Outbox(True, lambda message, size: refused.append((message, size)), limit=1000)
    sent = [observed(0, 2000), observed(1), observed(2, 2000), observed(3)]
    for message in sent:
        box.put(message)
    encoded, _ = await box.take()
    assert list(messages(encoded, pb.SessionRequest)) == [sent[1], sent[3]]
    assert refused == [(sent[0], sent[0].ByteSize()), (sent[2], sent[2].ByteSize())]


async def test_a_batch_has_no_more_messages_than_the_coordinator_takes() -> None:
    box: Outbox[pb.SessionRequest] = Outbox(True)
    for number in range(FULL_ENTRIES + 1):
        box.put(observed(number))
    sizes = [len(messages((await box.take())[0], pb.SessionRequest)) for _ in range(2)]
    assert sizes == [FULL_ENTRIES, 1]
    assert FULL_ENTRIES < MOST_BATCH


def test_what_is_no_message_is_malformed() -> None:
    for encoded in (b"\xff\xff", b"\xc2\x02\x00" * (MOST_ENTRIES + 1)):
        with pytest.raises(MalformedError):
            messages(encoded, pb.SessionRequest)
