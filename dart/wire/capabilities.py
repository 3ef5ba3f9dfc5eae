"""Every capability: the names with which Hello and Welcome say what an end can do beyond the protocol's first version.

A name exists from some protocol version on. Once `dart.wire.channel.OLDEST_PROTOCOL_VERSION` reaches the version in
which every worker has it, both ends may take it for granted. The name stays in this file, so that it is never given
another meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from dart.v1 import session_pb2 as pb

BATCHES = "batches"
ORACLE = "oracle"
SHARED_BLOBS = "shared_blobs"
FORCED_TEXT = "forced_text"
HOLD_SCREENSHOTS = "hold_screenshots"
RECEIVES_WHILE_SERVING = "receives_while_serving"
IMAGES_ONCE = "images_once"
IMAGES_APART = "images_apart"
RESCORE = "rescore"
SLOTS = "slots"
SCREENSHOT_TOKENS = "screenshot_tokens"
PACKED_TOKEN_IDS = "packed_token_ids"
SERVES_ADAPTER = "serves_adapter"
NOTICES = "notices"


@dataclass(frozen=True, slots=True)
class Capability:
    name: str
    roles: tuple[str, ...]
    """The roles that name it in Hello; "coordinator" names it in Welcome."""
    meaning: str
    granted_since: int | None = None
    """The protocol version from which every worker has it, so that nobody has to ask; None while it must be asked
    for."""


KNOWN = {
    one.name: one
    for one in (
        Capability(BATCHES, ("env", "rollout", "train", "coordinator"), "reads several messages in one"),
        Capability(ORACLE, ("env",), "answers Suggest"),
        Capability(
            SHARED_BLOBS,
            ("env", "rollout", "train"),
            "understands `shared_blobs` in its config, and uses the run's directory of screenshots where it sees it",
        ),
        Capability(FORCED_TEXT, ("rollout",), "understands `forced_text` of Generate"),
        Capability(HOLD_SCREENSHOTS, ("rollout",), "takes screenshots ahead of a prompt (HoldScreenshots)"),
        Capability(
            RECEIVES_WHILE_SERVING, ("rollout",), "takes weights into host memory while it serves (ReceiveWeights)"
        ),
        Capability(IMAGES_ONCE, ("train",), "finds a screenshot's bytes in another sample of the update"),
        Capability(IMAGES_APART, ("train",), "finds screenshots beside the samples (`TrainBatch.images`)"),
        Capability(RESCORE, ("train",), "understands `rescore` of Sample"),
        Capability(SCREENSHOT_TOKENS, ("rollout",), "understands `screenshot_tokens` in its config"),
        Capability(
            PACKED_TOKEN_IDS, ("rollout",), "understands `packed_token_ids` in its config, and then packs prompts' ids"
        ),
        Capability(SERVES_ADAPTER, ("rollout",), "understands `adapter` in its config, and takes adapters as weights"),
        Capability(NOTICES, ("env", "rollout", "train"), "logs what the coordinator says of its mistakes (Notice)"),
        Capability(
            SLOTS,
            ("env", "rollout"),
            "sends Slots when its environments, or its room for requests, change after Ready",
        ),
    )
}


def has(end: pb.Hello | pb.Welcome, name: str) -> bool:
    """True when the end with this Hello or Welcome has the capability."""
    granted = KNOWN[name].granted_since
    if granted is not None and isinstance(end, pb.Hello) and end.protocol_version >= granted:
        return True
    return name in end.capabilities
