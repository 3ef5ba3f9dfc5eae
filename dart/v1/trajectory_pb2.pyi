from dart.v1 import action_pb2 as _action_pb2
from dart.v1 import image_pb2 as _image_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Termination(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TERMINATION_UNSPECIFIED: _ClassVar[Termination]
    TERMINATION_ENVIRONMENT: _ClassVar[Termination]
    TERMINATION_FINISHED: _ClassVar[Termination]
    TERMINATION_STEP_LIMIT: _ClassVar[Termination]
    TERMINATION_UNPARSABLE: _ClassVar[Termination]
    TERMINATION_CONTEXT_FULL: _ClassVar[Termination]
TERMINATION_UNSPECIFIED: Termination
TERMINATION_ENVIRONMENT: Termination
TERMINATION_FINISHED: Termination
TERMINATION_STEP_LIMIT: Termination
TERMINATION_UNPARSABLE: Termination
TERMINATION_CONTEXT_FULL: Termination

class Task(_message.Message):
    __slots__ = ("id", "suite", "name", "seed")
    ID_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    id: str
    suite: str
    name: str
    seed: int
    def __init__(self, id: _Optional[str] = ..., suite: _Optional[str] = ..., name: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("index", "images", "prompt_token_ids", "token_ids", "logprobs", "versions", "text", "action", "parse_error", "reading_rules", "accessibility_tree", "last_action_error")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    PARSE_ERROR_FIELD_NUMBER: _ClassVar[int]
    READING_RULES_FIELD_NUMBER: _ClassVar[int]
    ACCESSIBILITY_TREE_FIELD_NUMBER: _ClassVar[int]
    LAST_ACTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    index: int
    images: _containers.RepeatedCompositeFieldContainer[_image_pb2.Image]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    text: str
    action: _action_pb2.Action
    parse_error: str
    reading_rules: str
    accessibility_tree: str
    last_action_error: str
    def __init__(self, index: _Optional[int] = ..., images: _Optional[_Iterable[_Union[_image_pb2.Image, _Mapping]]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., text: _Optional[str] = ..., action: _Optional[_Union[_action_pb2.Action, _Mapping]] = ..., parse_error: _Optional[str] = ..., reading_rules: _Optional[str] = ..., accessibility_tree: _Optional[str] = ..., last_action_error: _Optional[str] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("id", "group_id", "task", "instruction", "steps", "termination", "reward", "success", "step_limit", "advantage", "fate", "started_unix_seconds", "finished_unix_seconds", "pooled_from", "evidence_json", "advantages", "goal_images", "state_judged", "state_reward", "state_success")
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TERMINATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    STEP_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FROM_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    GOAL_IMAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_JUDGED_FIELD_NUMBER: _ClassVar[int]
    STATE_REWARD_FIELD_NUMBER: _ClassVar[int]
    STATE_SUCCESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    group_id: str
    task: Task
    instruction: str
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    termination: Termination
    reward: float
    success: bool
    step_limit: int
    advantage: float
    fate: str
    started_unix_seconds: float
    finished_unix_seconds: float
    pooled_from: str
    evidence_json: str
    advantages: _containers.RepeatedScalarFieldContainer[float]
    goal_images: int
    state_judged: bool
    state_reward: float
    state_success: bool
    def __init__(self, id: _Optional[str] = ..., group_id: _Optional[str] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., instruction: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ..., termination: _Optional[_Union[Termination, str]] = ..., reward: _Optional[float] = ..., success: bool = ..., step_limit: _Optional[int] = ..., advantage: _Optional[float] = ..., fate: _Optional[str] = ..., started_unix_seconds: _Optional[float] = ..., finished_unix_seconds: _Optional[float] = ..., pooled_from: _Optional[str] = ..., evidence_json: _Optional[str] = ..., advantages: _Optional[_Iterable[float]] = ..., goal_images: _Optional[int] = ..., state_judged: bool = ..., state_reward: _Optional[float] = ..., state_success: bool = ...) -> None: ...
