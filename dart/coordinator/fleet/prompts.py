"""A prompt's screenshots on their way to a replica: with the request, or, where that would be too large, before it.

What always holds: a screenshot that the replica keeps is not sent again; what it keeps and what is sent are decided in
one step, because every request changes the former in the order of sending; and no message is over the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dart.coordinator.fleet.sessions import Worker
from dart.core.types import Image, Prompt
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import HOLD_SCREENSHOTS, has
from dart.wire.channel import IMAGE_BYTES, ROOM_BYTES
from dart.wire.convert import encoded_blocks, encoded_with_data, write_image

ROUNDS = 4
"""Other requests may evict from the replica's cache what was sent ahead for this one; then it is sent again."""


class PromptTooLarge(Exception):
    """No message can carry the prompt, and this replica cannot take it in parts. The replica is not to blame."""


async def encoded_prompt(
    request: pb.Generate, prompt: Prompt, worker: Worker, screenshots: StoredScreenshots, with_data: bool
) -> Sequence[bytes]:
    """The encoded prompt of this request, with the bytes of the screenshots that the replica does not hold; with
    `with_data`, of all.

    The request has everything else already, and must then be sent without an await in between. Raises ScreenshotLost,
    PromptTooLarge, and what `Worker.call` raises when screenshots are sent ahead.
    """
    stored: dict[bytes, bytes] = {}
    blocks = encoded_blocks(prompt)
    words = len(request.forced_text) + sum(map(len, blocks))
    if _needs_no_care(prompt, words, worker, with_data):
        return _with_screenshots(blocks, prompt, worker, stored, with_data)
    for _ in range(ROUNDS):
        lacking = await _lacking(stored, prompt, worker, screenshots, with_data)
        if words + sum(map(len, lacking.values())) <= ROOM_BYTES:
            return _with_screenshots(blocks, prompt, worker, stored, with_data)
        await _send_ahead(request.assignment, prompt, words, worker, lacking)
        with_data = False
    raise PromptTooLarge(
        f"{worker.id} has no room for the {len(prompt.images)} screenshots of a prompt in addition to those of other "
        "requests: raise rollout.image_cache_entries"
    )


def _needs_no_care(prompt: Prompt, size: int, worker: Worker, with_data: bool) -> bool:
    """All bytes are at hand, and fit even if the replica lacks every screenshot. So it is with nearly all prompts."""
    reads = with_data or not worker.shares_blobs
    for image in prompt.images:
        if reads and not image.data:
            return False
        size += len(image.data)
    return size <= ROOM_BYTES


async def _lacking(
    stored: dict[bytes, bytes], prompt: Prompt, worker: Worker, screenshots: StoredScreenshots, with_data: bool
) -> dict[bytes, bytes]:
    """Digest → bytes of what the replica lacks; b"" if it can read them from the run's directory itself.

    What only the run's store has is read into `stored`; meanwhile the replica may evict more.
    """
    digests = [image.sha256 for image in prompt.images]
    while True:
        lacking = set(digests) if with_data else worker.screenshots.lacking(digests)
        wanted = [image for image in prompt.images if image.sha256 in lacking and not image.data]
        if worker.shares_blobs and not with_data:
            wanted = []
        wanted = [image for image in wanted if image.sha256 not in stored]
        if not wanted:
            break
        stored |= await screenshots.missing(wanted)
    return {
        image.sha256: image.data or stored.get(image.sha256, b"") for image in prompt.images if image.sha256 in lacking
    }


def _with_screenshots(
    blocks: list[bytes], prompt: Prompt, worker: Worker, stored: dict[bytes, bytes], with_data: bool
) -> Sequence[bytes]:
    """The encoded blocks with the bytes that the replica lacks, each where it comes to it. `with_data`: of all."""
    held = worker.screenshots
    sent: set[bytes] = set()
    occurrences = []
    for occurrence, image in enumerate(prompt.images):
        digest = image.sha256
        if digest not in held or (with_data and digest not in sent):
            sent.add(digest)
            occurrences.append(occurrence)
        # A worker that shares the store keeps what it reads there, as if it had been sent.
        held.note(digest, True)
    occurrence = len(prompt.images)
    for number in range(len(blocks) - 1, -1, -1):  # from the end: it is mostly the last one that must be sent
        if not occurrences or occurrence <= occurrences[0]:
            break
        block = prompt.blocks[number]
        data = {}
        for place, image in reversed(block.images):
            occurrence -= 1
            if occurrence in occurrences and (found := image.data or stored.get(image.sha256)):
                data[place] = found
        if data:
            blocks[number : number + 1] = encoded_with_data(block, data)
    return blocks


async def _send_ahead(
    assignment: pb.Assignment, prompt: Prompt, words: int, worker: Worker, lacking: dict[bytes, bytes]
) -> None:
    """Send the screenshots that the replica lacks ahead, in messages of their own. Raises PromptTooLarge."""
    size = words + sum(map(len, lacking.values()))
    largest = max(map(len, lacking.values()), default=0)
    if words > ROOM_BYTES or largest + IMAGE_BYTES > ROOM_BYTES:
        raise PromptTooLarge(
            f"a prompt has {words} bytes of text and its largest screenshot {largest}, but a message has room for "
            f"{ROOM_BYTES}: shorten the history (agent.history_turns) or make screenshots smaller"
        )
    if not has(worker.hello, HOLD_SCREENSHOTS):
        raise PromptTooLarge(
            f"a prompt has {size} bytes with its screenshots, a message has room for {ROOM_BYTES}, and {worker.id} "
            "cannot take screenshots in advance: update dart there, or lower agent.history_screenshots"
        )
    distinct = len({image.sha256 for image in prompt.images})
    if distinct > worker.screenshots.capacity:
        raise PromptTooLarge(
            f"a prompt has {size} bytes with its {distinct} screenshots, a message has room for {ROOM_BYTES}, and "
            f"{worker.id} keeps only {worker.screenshots.capacity}: raise rollout.image_cache_entries"
        )
    for page in _pages(prompt, lacking):
        message = pb.SessionResponse()
        command = message.hold_screenshots
        command.assignment.CopyFrom(assignment)
        for image in page:
            write_image(command.images.add(), image, with_data=False)
            command.images[-1].data = lacking[image.sha256]
            worker.screenshots.note(image.sha256, True)
        await worker.call(message)


def _pages(prompt: Prompt, lacking: dict[bytes, bytes]) -> Iterator[list[Image]]:
    """The screenshots whose bytes must be sent, each once, in messages that fit."""
    page: list[Image] = []
    size = 0
    for image in {image.sha256: image for image in prompt.images if lacking.get(image.sha256)}.values():
        weight = len(lacking[image.sha256]) + IMAGE_BYTES
        if page and size + weight > ROOM_BYTES:
            yield page
            page, size = [], 0
        page.append(image)
        size += weight
    if page:
        yield page
