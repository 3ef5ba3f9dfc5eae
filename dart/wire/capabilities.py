"""Every capability: the names with which Hello and Welcome say what an end can do beyond the protocol's first version.

A name is never given another meaning, so none leaves this file.
"""

from __future__ import annotations

from dart.v1 import session_pb2 as pb

BATCHES = "batches"
"""Every role, and the coordinator in Welcome: reads several messages in one."""
NOTICES = "notices"
"""Every role: logs what the coordinator says of its mistakes (Notice)."""
SHARED_BLOBS = "shared_blobs"
"""Every role: understands `shared_blobs` in its config, and uses the run's screenshots where it sees their folder."""
SLOTS = "slots"
"""env, rollout: sends Slots when its environments, or its room for requests, change after Ready."""
ORACLE = "oracle"
"""env: answers Suggest."""
FORCED_TEXT = "forced_text"
"""rollout: understands `forced_text` of Generate."""
HOLD_SCREENSHOTS = "hold_screenshots"
"""rollout: takes screenshots ahead of a prompt (HoldScreenshots)."""
RECEIVES_WHILE_SERVING = "receives_while_serving"
"""rollout: takes weights into host memory while it serves (ReceiveWeights)."""
SCREENSHOT_TOKENS = "screenshot_tokens"
"""rollout: understands `screenshot_tokens` in its config."""
PACKED_TOKEN_IDS = "packed_token_ids"
"""rollout: understands `packed_token_ids` in its config, and then packs prompts' ids."""
SERVES_ADAPTER = "serves_adapter"
"""rollout: understands `adapter` in its config, and takes adapters as weights."""
IMAGES_ONCE = "images_once"
"""train: finds a screenshot's bytes in another sample of the update."""
IMAGES_APART = "images_apart"
"""train: finds screenshots beside the samples (`TrainBatch.images`)."""
RESCORE = "rescore"
"""train: understands `rescore` of Sample."""
ABORTS_TRANSFERS = "aborts_transfers"
"""train: ends the transfer of a SendWeights at an Abort."""


def has(end: pb.Hello | pb.Welcome, name: str) -> bool:
    """True when the end with this Hello or Welcome has the capability."""
    return name in end.capabilities
