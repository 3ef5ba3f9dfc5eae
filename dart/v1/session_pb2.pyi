from dart.v1 import action_pb2 as _action_pb2
from dart.v1 import image_pb2 as _image_pb2
from dart.v1 import trajectory_pb2 as _trajectory_pb2
from dart.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ENV: _ClassVar[Role]
    ROLE_ROLLOUT: _ClassVar[Role]
    ROLE_TRAIN: _ClassVar[Role]

class FailureCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CODE_UNSPECIFIED: _ClassVar[FailureCode]
    FAILURE_CODE_ENVIRONMENT: _ClassVar[FailureCode]
    FAILURE_CODE_ENGINE: _ClassVar[FailureCode]
    FAILURE_CODE_ABORTED: _ClassVar[FailureCode]
    FAILURE_CODE_UNKNOWN_IMAGE: _ClassVar[FailureCode]
    FAILURE_CODE_INVALID: _ClassVar[FailureCode]
    FAILURE_CODE_TRANSFER: _ClassVar[FailureCode]
    FAILURE_CODE_TRAINER: _ClassVar[FailureCode]
    FAILURE_CODE_CONTEXT_FULL: _ClassVar[FailureCode]
    FAILURE_CODE_BROKEN: _ClassVar[FailureCode]
    FAILURE_CODE_TASK: _ClassVar[FailureCode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
ROLE_UNSPECIFIED: Role
ROLE_ENV: Role
ROLE_ROLLOUT: Role
ROLE_TRAIN: Role
FAILURE_CODE_UNSPECIFIED: FailureCode
FAILURE_CODE_ENVIRONMENT: FailureCode
FAILURE_CODE_ENGINE: FailureCode
FAILURE_CODE_ABORTED: FailureCode
FAILURE_CODE_UNKNOWN_IMAGE: FailureCode
FAILURE_CODE_INVALID: FailureCode
FAILURE_CODE_TRANSFER: FailureCode
FAILURE_CODE_TRAINER: FailureCode
FAILURE_CODE_CONTEXT_FULL: FailureCode
FAILURE_CODE_BROKEN: FailureCode
FAILURE_CODE_TASK: FailureCode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class SessionRequest(_message.Message):
    __slots__ = ("hello", "ready", "heartbeat", "bye", "failure", "observed", "released", "suggested", "slots", "generated", "weights_loaded", "receiving_weights", "screenshots_held", "trained", "weights_sent", "checkpoint_saved", "batch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    SUGGESTED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LOADED_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SCREENSHOTS_HELD_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SENT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SAVED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    heartbeat: Heartbeat
    bye: Bye
    failure: Failure
    observed: Observed
    released: Released
    suggested: Suggested
    slots: Slots
    generated: Generated
    weights_loaded: WeightsLoaded
    receiving_weights: ReceivingWeights
    screenshots_held: ScreenshotsHeld
    trained: Trained
    weights_sent: WeightsSent
    checkpoint_saved: CheckpointSaved
    batch: _containers.RepeatedCompositeFieldContainer[SessionRequest]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., observed: _Optional[_Union[Observed, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., suggested: _Optional[_Union[Suggested, _Mapping]] = ..., slots: _Optional[_Union[Slots, _Mapping]] = ..., generated: _Optional[_Union[Generated, _Mapping]] = ..., weights_loaded: _Optional[_Union[WeightsLoaded, _Mapping]] = ..., receiving_weights: _Optional[_Union[ReceivingWeights, _Mapping]] = ..., screenshots_held: _Optional[_Union[ScreenshotsHeld, _Mapping]] = ..., trained: _Optional[_Union[Trained, _Mapping]] = ..., weights_sent: _Optional[_Union[WeightsSent, _Mapping]] = ..., checkpoint_saved: _Optional[_Union[CheckpointSaved, _Mapping]] = ..., batch: _Optional[_Iterable[_Union[SessionRequest, _Mapping]]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "reject", "heartbeat", "bye", "notice", "reset", "act", "release", "suggest", "generate", "abort", "load_weights", "receive_weights", "hold_screenshots", "train_batch", "send_weights", "save_checkpoint", "batch")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    ACT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SUGGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    HOLD_SCREENSHOTS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_BATCH_FIELD_NUMBER: _ClassVar[int]
    SEND_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SAVE_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reject: Reject
    heartbeat: Heartbeat
    bye: Bye
    notice: Notice
    reset: Reset
    act: Act
    release: Release
    suggest: Suggest
    generate: Generate
    abort: Abort
    load_weights: LoadWeights
    receive_weights: ReceiveWeights
    hold_screenshots: HoldScreenshots
    train_batch: TrainBatch
    send_weights: SendWeights
    save_checkpoint: SaveCheckpoint
    batch: _containers.RepeatedCompositeFieldContainer[SessionResponse]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., act: _Optional[_Union[Act, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., suggest: _Optional[_Union[Suggest, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., load_weights: _Optional[_Union[LoadWeights, _Mapping]] = ..., receive_weights: _Optional[_Union[ReceiveWeights, _Mapping]] = ..., hold_screenshots: _Optional[_Union[HoldScreenshots, _Mapping]] = ..., train_batch: _Optional[_Union[TrainBatch, _Mapping]] = ..., send_weights: _Optional[_Union[SendWeights, _Mapping]] = ..., save_checkpoint: _Optional[_Union[SaveCheckpoint, _Mapping]] = ..., batch: _Optional[_Iterable[_Union[SessionResponse, _Mapping]]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("assignment_id", "attempt", "epoch", "sequence")
    ASSIGNMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    assignment_id: str
    attempt: int
    epoch: int
    sequence: int
    def __init__(self, assignment_id: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "instance_id", "role", "capabilities", "last_epoch", "protocol_version", "rank", "world_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    role: Role
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    last_epoch: int
    protocol_version: int
    rank: int
    world_size: int
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., capabilities: _Optional[_Iterable[str]] = ..., last_epoch: _Optional[int] = ..., protocol_version: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "config_json", "heartbeat_seconds", "run_id", "resumed", "capabilities", "lost_after_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LOST_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    config_json: str
    heartbeat_seconds: float
    run_id: str
    resumed: bool
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    lost_after_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., config_json: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ..., run_id: _Optional[str] = ..., resumed: bool = ..., capabilities: _Optional[_Iterable[str]] = ..., lost_after_seconds: _Optional[float] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("reason", "remedy", "retry_after_seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    remedy: str
    retry_after_seconds: float
    def __init__(self, reason: _Optional[str] = ..., remedy: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("slots", "weight_version", "engine_ranks", "image_cache_entries", "transfer_host", "versions", "shares_blobs", "longest_seconds")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LongestSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RANKS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_CACHE_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_HOST_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SHARES_BLOBS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    slots: int
    weight_version: int
    engine_ranks: int
    image_cache_entries: int
    transfer_host: str
    versions: _containers.ScalarMap[str, str]
    shares_blobs: bool
    longest_seconds: _containers.ScalarMap[str, float]
    def __init__(self, slots: _Optional[int] = ..., weight_version: _Optional[int] = ..., engine_ranks: _Optional[int] = ..., image_cache_entries: _Optional[int] = ..., transfer_host: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., shares_blobs: bool = ..., longest_seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("count", "granted", "booting", "reason", "quarantined")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    BOOTING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    count: int
    granted: int
    booting: int
    reason: str
    quarantined: int
    def __init__(self, count: _Optional[int] = ..., granted: _Optional[int] = ..., booting: _Optional[int] = ..., reason: _Optional[str] = ..., quarantined: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sent_unix_seconds",)
    SENT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    sent_unix_seconds: float
    def __init__(self, sent_unix_seconds: _Optional[float] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason", "refused")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    refused: bool
    def __init__(self, reason: _Optional[str] = ..., refused: bool = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("reason", "assignment")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    assignment: Assignment
    def __init__(self, reason: _Optional[str] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("assignment", "code", "message", "trajectory_ids")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_IDS_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    code: FailureCode
    message: str
    trajectory_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., code: _Optional[_Union[FailureCode, str]] = ..., message: _Optional[str] = ..., trajectory_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ("assignment", "task")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    task: _trajectory_pb2.Task
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., task: _Optional[_Union[_trajectory_pb2.Task, _Mapping]] = ...) -> None: ...

class Act(_message.Message):
    __slots__ = ("assignment", "action", "last")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    action: _action_pb2.Action
    last: bool
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., action: _Optional[_Union[_action_pb2.Action, _Mapping]] = ..., last: bool = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class Observed(_message.Message):
    __slots__ = ("assignment", "image", "instruction", "done", "reward", "seconds", "evidence_json", "accessibility_tree", "last_action_error", "goal_images")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    ACCESSIBILITY_TREE_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    GOAL_IMAGES_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    image: _image_pb2.Image
    instruction: str
    done: bool
    reward: float
    seconds: float
    evidence_json: str
    accessibility_tree: str
    last_action_error: str
    goal_images: _containers.RepeatedCompositeFieldContainer[_image_pb2.Image]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., image: _Optional[_Union[_image_pb2.Image, _Mapping]] = ..., instruction: _Optional[str] = ..., done: bool = ..., reward: _Optional[float] = ..., seconds: _Optional[float] = ..., evidence_json: _Optional[str] = ..., accessibility_tree: _Optional[str] = ..., last_action_error: _Optional[str] = ..., goal_images: _Optional[_Iterable[_Union[_image_pb2.Image, _Mapping]]] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class Suggest(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class Suggested(_message.Message):
    __slots__ = ("assignment", "action")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    action: _action_pb2.Action
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., action: _Optional[_Union[_action_pb2.Action, _Mapping]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("markup", "text", "token_ids", "image")
    MARKUP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    markup: str
    text: str
    token_ids: TokenIds
    image: _image_pb2.Image
    def __init__(self, markup: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., image: _Optional[_Union[_image_pb2.Image, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("assignment", "prompt", "sampling", "forced_text")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FORCED_TEXT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    prompt: _containers.RepeatedCompositeFieldContainer[PromptPart]
    sampling: SamplingParams
    forced_text: str
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., prompt: _Optional[_Iterable[_Union[PromptPart, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., forced_text: _Optional[str] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class HoldScreenshots(_message.Message):
    __slots__ = ("assignment", "images")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    images: _containers.RepeatedCompositeFieldContainer[_image_pb2.Image]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., images: _Optional[_Iterable[_Union[_image_pb2.Image, _Mapping]]] = ...) -> None: ...

class ScreenshotsHeld(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class Generated(_message.Message):
    __slots__ = ("assignment", "prompt_token_ids", "token_ids", "logprobs", "versions", "text", "finish_reason", "seconds", "packed_prompt_token_ids", "cached_tokens")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PACKED_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    text: str
    finish_reason: FinishReason
    seconds: float
    packed_prompt_token_ids: bytes
    cached_tokens: int
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., seconds: _Optional[float] = ..., packed_prompt_token_ids: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ReceiveWeights(_message.Message):
    __slots__ = ("assignment", "version", "group", "tensors")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    version: int
    group: _weights_pb2.TransferGroup
    tensors: _containers.RepeatedCompositeFieldContainer[_weights_pb2.TensorInfo]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., version: _Optional[int] = ..., group: _Optional[_Union[_weights_pb2.TransferGroup, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[_weights_pb2.TensorInfo, _Mapping]]] = ...) -> None: ...

class ReceivingWeights(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class LoadWeights(_message.Message):
    __slots__ = ("assignment", "version", "group", "pause_mode", "tensors")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    version: int
    group: _weights_pb2.TransferGroup
    pause_mode: _weights_pb2.PauseMode
    tensors: _containers.RepeatedCompositeFieldContainer[_weights_pb2.TensorInfo]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., version: _Optional[int] = ..., group: _Optional[_Union[_weights_pb2.TransferGroup, _Mapping]] = ..., pause_mode: _Optional[_Union[_weights_pb2.PauseMode, str]] = ..., tensors: _Optional[_Iterable[_Union[_weights_pb2.TensorInfo, _Mapping]]] = ...) -> None: ...

class WeightsLoaded(_message.Message):
    __slots__ = ("assignment", "version", "pause_seconds", "bytes", "checksum")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    version: int
    pause_seconds: float
    bytes: int
    checksum: int
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., version: _Optional[int] = ..., pause_seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("trajectory_id", "step_index", "group_id", "advantage", "prompt_token_ids", "token_ids", "logprobs", "versions", "images", "rescore")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    RESCORE_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    step_index: int
    group_id: str
    advantage: float
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.VersionSpan]
    images: _containers.RepeatedCompositeFieldContainer[_image_pb2.Image]
    rescore: bool
    def __init__(self, trajectory_id: _Optional[str] = ..., step_index: _Optional[int] = ..., group_id: _Optional[str] = ..., advantage: _Optional[float] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[_Union[_trajectory_pb2.VersionSpan, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[_image_pb2.Image, _Mapping]]] = ..., rescore: bool = ...) -> None: ...

class TrainBatch(_message.Message):
    __slots__ = ("assignment", "update", "page", "pages", "samples", "total_samples", "total_tokens", "images")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    update: int
    page: int
    pages: int
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    total_samples: int
    total_tokens: int
    images: _containers.RepeatedCompositeFieldContainer[_image_pb2.Image]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., update: _Optional[int] = ..., page: _Optional[int] = ..., pages: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., total_samples: _Optional[int] = ..., total_tokens: _Optional[int] = ..., images: _Optional[_Iterable[_Union[_image_pb2.Image, _Mapping]]] = ...) -> None: ...

class Trained(_message.Message):
    __slots__ = ("assignment", "update", "weight_version", "metrics", "seconds", "tensors", "remarks", "step_entropies")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    REMARKS_FIELD_NUMBER: _ClassVar[int]
    STEP_ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    update: int
    weight_version: int
    metrics: _containers.ScalarMap[str, float]
    seconds: float
    tensors: _containers.RepeatedCompositeFieldContainer[_weights_pb2.TensorInfo]
    remarks: _containers.RepeatedScalarFieldContainer[str]
    step_entropies: _containers.RepeatedCompositeFieldContainer[StepEntropy]
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., update: _Optional[int] = ..., weight_version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., seconds: _Optional[float] = ..., tensors: _Optional[_Iterable[_Union[_weights_pb2.TensorInfo, _Mapping]]] = ..., remarks: _Optional[_Iterable[str]] = ..., step_entropies: _Optional[_Iterable[_Union[StepEntropy, _Mapping]]] = ...) -> None: ...

class StepEntropy(_message.Message):
    __slots__ = ("trajectory_id", "step_index", "entropy", "selected", "token_entropies")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ENTROPIES_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    step_index: int
    entropy: float
    selected: bool
    token_entropies: bytes
    def __init__(self, trajectory_id: _Optional[str] = ..., step_index: _Optional[int] = ..., entropy: _Optional[float] = ..., selected: bool = ..., token_entropies: _Optional[bytes] = ...) -> None: ...

class SendWeights(_message.Message):
    __slots__ = ("assignment", "version", "group")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    version: int
    group: _weights_pb2.TransferGroup
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., version: _Optional[int] = ..., group: _Optional[_Union[_weights_pb2.TransferGroup, _Mapping]] = ...) -> None: ...

class WeightsSent(_message.Message):
    __slots__ = ("assignment", "version", "seconds", "bytes", "checksum")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    version: int
    seconds: float
    bytes: int
    checksum: int
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., version: _Optional[int] = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class SaveCheckpoint(_message.Message):
    __slots__ = ("assignment", "path")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    path: str
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., path: _Optional[str] = ...) -> None: ...

class CheckpointSaved(_message.Message):
    __slots__ = ("assignment", "path", "weight_version", "seconds")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    assignment: Assignment
    path: str
    weight_version: int
    seconds: float
    def __init__(self, assignment: _Optional[_Union[Assignment, _Mapping]] = ..., path: _Optional[str] = ..., weight_version: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
