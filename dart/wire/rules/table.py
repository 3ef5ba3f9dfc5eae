"""The table of rules: what every field of every message from a peer must be like.

`tests/boundary/test_rules.py` walks the protobuf descriptors and fails if a field has no rule here, so that nobody adds
a field without saying what it may hold. Rules that depend on the command being answered are in `answers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dart.core.action import MOST_HELD_SECONDS, MOST_TOGETHER
from dart.wire.rules.kinds import (
    Many,
    Name,
    Note,
    Octets,
    One,
    Payload,
    Real,
    Rule,
    Table,
    Text,
    Tokens,
    Whole,
    Words,
    Yes,
)

MOST_STORED = 2**63 - 1
"""The largest whole number that the database holds."""
MOST_U64 = 2**64 - 1
MOST_BATCH = 10_000
"""The most messages in a batch; `dart.wire.outbox` puts at most a tenth as many into one."""
MOST_SLOTS = 65_536
MOST_ENGINE_RANKS = 1_024
MOST_TOKENS = 1 << 20
"""The most tokens of a prompt, and of an answer."""
MOST_TOKEN_ID = (1 << 24) - 1
"""No vocabulary is larger; if the run's own is known, that is the bound (`answers.Limits`)."""
MOST_SPANS = 4_096
MOST_TENSORS = 45_000
MOST_SIDE = 32_768
"""The most pixels of a screenshot's width or height; `dart.screenshots.header.MAX_PIXELS` bounds their product."""
MOST_SECONDS = 1e8
LONGEST_COMMAND_SECONDS = 86_400.0
"""The longest that a worker may ask for a command: until then, one that hangs is not noticed."""
LOGPROB_TOLERANCE = 1e-3
"""A log-probability may exceed 0 by this much, by rounding."""
NOTE_CHARACTERS = 2_000
INSTRUCTION_CHARACTERS = 65_536
EVIDENCE_CHARACTERS = 65_536
TREE_CHARACTERS = 1 << 18
ERROR_CHARACTERS = 8_192
MOST_GOAL_IMAGES = 16
WORDS_CHARACTERS = 1 << 20
ANY_NUMBER = Whole(0, MOST_U64)
STORED = Whole(0, MOST_STORED)
SECONDS = Real(0.0, MOST_SECONDS)
TOKEN_IDS = Tokens(MOST_TOKENS, MOST_TOKEN_ID)
BELOW_ONE = math.nextafter(1.0, 0.0)
AT = One("a point of the observation")
HELD = Real(0.0, MOST_HELD_SECONDS)

RULES: Mapping[str, Mapping[str, Rule]] = {
    "SessionRequest": {
        **dict.fromkeys(
            ("hello", "ready", "heartbeat", "bye", "failure", "observed", "released", "suggested", "generated",
             "weights_loaded", "receiving_weights", "trained", "weights_sent", "checkpoint_saved", "slots",
             "screenshots_held"),
            One(),
        ),
        "batch": Many(MOST_BATCH, One("a message with a body, not another batch")),
    },
    # The session compares it, number by number, with the commands that it waits for: one that differs answers nothing.
    "Assignment": {
        "assignment_id": Name(128),
        "attempt": Whole(0, 2**32 - 1),
        "epoch": ANY_NUMBER,
        "sequence": Whole(0, 2**32 - 1),
    },
    "Hello": {
        "worker_id": Name(128),
        "instance_id": Name(128),
        "role": Whole(1, 3, "env, rollout or train"),
        "capabilities": Many(64, Name(64)),
        "last_epoch": ANY_NUMBER,
        "protocol_version": Whole(0, 1_000_000),
        "rank": Whole(0, 65_535),
        "world_size": Whole(0, 65_536),
    },
    "Ready": {
        "slots": Whole(1, MOST_SLOTS),
        "weight_version": STORED,
        "engine_ranks": Whole(0, MOST_ENGINE_RANKS),
        "image_cache_entries": Whole(0, 1 << 20),
        "transfer_host": Name(253, 0),
        "versions": Table(64, Text(64, 1), Text(128)),
        "shares_blobs": Yes(),
        "longest_seconds": Table(16, Text(32, 1), Real(0.0, LONGEST_COMMAND_SECONDS)),
    },
    # The env pool counts them against Ready.slots and the resets that it has sent.
    "Slots": {
        "count": Whole(0, MOST_SLOTS),
        "granted": STORED,
        "booting": Whole(0, MOST_SLOTS),
        "reason": Note(NOTE_CHARACTERS),
        "quarantined": Whole(0, MOST_SLOTS),
    },
    "Heartbeat": {"sent_unix_seconds": Real(-1e12, 1e12)},
    "Bye": {"reason": Note(NOTE_CHARACTERS), "refused": Yes()},
    # An unknown code is treated as none: a newer worker may know more.
    "Failure": {
        "assignment": One(),
        "code": Whole(0, 1_000),
        "message": Note(NOTE_CHARACTERS),
        "trajectory_ids": Many(4_096, Text(256)),
    },
    "Observed": {
        "assignment": One(),
        "image": One(),
        "instruction": Words(INSTRUCTION_CHARACTERS),
        "done": Yes(),
        "reward": Real(0.0, 1.0),
        "seconds": SECONDS,
        "evidence_json": Words(EVIDENCE_CHARACTERS),
        "accessibility_tree": Words(TREE_CHARACTERS),
        "last_action_error": Words(ERROR_CHARACTERS),
        "goal_images": Many(MOST_GOAL_IMAGES, One()),
    },
    "Released": {"assignment": One()},
    "Suggested": {"assignment": One(), "action": One()},
    "Generated": {
        "assignment": One(),
        "prompt_token_ids": TOKEN_IDS,
        "packed_prompt_token_ids": Payload("ids as in prompt_token_ids, in four bytes each"),
        "cached_tokens": Whole(0, MOST_TOKENS),
        "token_ids": TOKEN_IDS,
        "logprobs": Many(MOST_TOKENS, Real(-math.inf, LOGPROB_TOLERANCE)),
        "versions": Many(MOST_SPANS, One()),
        "text": Words(WORDS_CHARACTERS),
        "finish_reason": Whole(1, 2, "stop or length"),
        "seconds": SECONDS,
    },
    "ReceivingWeights": {"assignment": One()},
    "ScreenshotsHeld": {"assignment": One()},
    "WeightsLoaded": {
        "assignment": One(),
        "version": STORED,
        "pause_seconds": SECONDS,
        "bytes": STORED,
        "checksum": STORED,
    },
    "Trained": {
        "assignment": One(),
        "update": STORED,
        "weight_version": STORED,
        # A metric that is not finite is left out: the update itself stands.
        "metrics": Table(1_000, Text(128, 1), Real(-1e300, 1e300)),
        "seconds": SECONDS,
        "tensors": Many(MOST_TENSORS, One()),
        "remarks": Many(1_000, Words(4_096)),
        "step_entropies": Many(MOST_BATCH, One()),
    },
    "StepEntropy": {
        "trajectory_id": Text(1_024, 1), "step_index": Whole(0, 1 << 20), "entropy": Real(0.0, 1e4), "selected": Yes(),
        "token_entropies": Payload("as many float16 numbers as the step has tokens"),
    },
    "WeightsSent": {"assignment": One(), "version": STORED, "seconds": SECONDS, "bytes": STORED, "checksum": STORED},
    "CheckpointSaved": {"assignment": One(), "path": Text(4_096), "weight_version": STORED, "seconds": SECONDS},
    "Image": {
        "sha256": Octets((0, 32)),
        "media_type": Name(64, 0),
        "width_pixels": Whole(0, MOST_SIDE),
        "height_pixels": Whole(0, MOST_SIDE),
        "data": Payload("the bytes that the digest was taken of"),
    },
    "VersionSpan": {"version": STORED, "start": Whole(0, MOST_TOKENS), "end": Whole(0, MOST_TOKENS)},
    "TensorInfo": {"name": Text(1_024, 1), "dtype": Name(32), "shape": Many(16, Whole(0, 1 << 48))},
    "Task": {"id": Text(1_024), "suite": Name(128), "name": Text(512, 1), "seed": STORED},
    "Action": dict.fromkeys(
        ("move", "click", "button", "drag", "scroll", "keys", "type_text", "wait", "observe", "finish", "system",
         "code", "several"),
        One(),
    ),
    "Point": {"x": Real(0.0, BELOW_ONE), "y": Real(0.0, BELOW_ONE)},
    "Move": {"at": AT},
    "Click": {
        "at": AT, "button": Whole(1, 3), "count": Whole(1, 10), "modifiers": Many(16, Name(64)), "hold_seconds": HELD,
    },
    "Button": {"at": AT, "button": Whole(1, 3), "mode": Whole(2, 3, "down or up")},
    "Drag": {"path": Many(1_000, AT), "button": Whole(1, 3), "duration_seconds": HELD},
    "Scroll": {"at": AT, "dx_notches": Whole(-10_000, 10_000), "dy_notches": Whole(-10_000, 10_000)},
    "Keys": {"keysyms": Many(32, Name(64)), "mode": Whole(1, 3)},
    "TypeText": {"text": Words(INSTRUCTION_CHARACTERS)},
    "Wait": {"seconds": Real(0.0, 86_400.0)},
    "Observe": {},
    "Finish": {"status": Whole(1, 4), "answer": Words(INSTRUCTION_CHARACTERS)},
    "System": {"kind": Whole(1, 7), "argument": Words(8_192)},
    "Several": {"actions": Many(MOST_TOGETHER, One())},
    "Code": {"language": Text(64), "source": Words(INSTRUCTION_CHARACTERS)},
    # ---- Control ----
    "GetStatusRequest": {},
    "WatchEventsRequest": {"from_sequence": ANY_NUMBER},
    "ListTrajectoriesRequest": {
        "task_name": Text(512), "page_size": Whole(0, 2**32 - 1, "what is above 1,000 counts as 1,000"),
        "page_token": Text(256),
    },
    "GetTrajectoryRequest": {"id": Text(256, 1), "with_images": Yes()},
    "SubmitTasksRequest": {"tasks": Many(10_000, One())},
    "PauseRequest": {},
    "ResumeRequest": {},
    "DrainRequest": {},
    "CheckpointRequest": {},
}  # fmt: skip
