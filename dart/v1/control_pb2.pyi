from dart.v1 import session_pb2 as _session_pb2
from dart.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "state", "slots", "busy", "weight_version", "seconds_since_heard", "doing")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARD_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _session_pb2.Role
    state: str
    slots: int
    busy: int
    weight_version: int
    seconds_since_heard: float
    doing: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_session_pb2.Role, str]] = ..., state: _Optional[str] = ..., slots: _Optional[int] = ..., busy: _Optional[int] = ..., weight_version: _Optional[int] = ..., seconds_since_heard: _Optional[float] = ..., doing: _Optional[str] = ...) -> None: ...

class TimeSpent(_message.Message):
    __slots__ = ("seconds", "idle_because", "queued_because")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class IdleBecauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class QueuedBecauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    seconds: _containers.ScalarMap[str, float]
    idle_because: _containers.ScalarMap[str, float]
    queued_because: _containers.ScalarMap[str, float]
    def __init__(self, seconds: _Optional[_Mapping[str, float]] = ..., idle_because: _Optional[_Mapping[str, float]] = ..., queued_because: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("updates", "version", "trajectories", "env_steps", "weight_syncs", "infrastructure_failures", "unparsable", "pooled", "trained_steps", "trained_tokens", "fates", "staleness", "reading_rules", "prompt_tokens", "cached_tokens")
    class FatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReadingRulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    ENV_STEPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SYNCS_FIELD_NUMBER: _ClassVar[int]
    INFRASTRUCTURE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    UNPARSABLE_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FATES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    READING_RULES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    updates: int
    version: int
    trajectories: int
    env_steps: int
    weight_syncs: int
    infrastructure_failures: int
    unparsable: int
    pooled: int
    trained_steps: int
    trained_tokens: int
    fates: _containers.ScalarMap[str, int]
    staleness: StalenessCounts
    reading_rules: _containers.ScalarMap[str, int]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, updates: _Optional[int] = ..., version: _Optional[int] = ..., trajectories: _Optional[int] = ..., env_steps: _Optional[int] = ..., weight_syncs: _Optional[int] = ..., infrastructure_failures: _Optional[int] = ..., unparsable: _Optional[int] = ..., pooled: _Optional[int] = ..., trained_steps: _Optional[int] = ..., trained_tokens: _Optional[int] = ..., fates: _Optional[_Mapping[str, int]] = ..., staleness: _Optional[_Union[StalenessCounts, _Mapping]] = ..., reading_rules: _Optional[_Mapping[str, int]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class StalenessCounts(_message.Message):
    __slots__ = ("sum", "max", "trajectories")
    SUM_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    sum: int
    max: int
    trajectories: int
    def __init__(self, sum: _Optional[int] = ..., max: _Optional[int] = ..., trajectories: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("env_utilisation", "rollout_utilisation", "trainer_utilisation", "trained_actions_per_minute", "sampled_actions_per_minute", "trained_tokens_per_minute")
    ENV_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    TRAINER_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ACTIONS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ACTIONS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    env_utilisation: float
    rollout_utilisation: float
    trainer_utilisation: float
    trained_actions_per_minute: float
    sampled_actions_per_minute: float
    trained_tokens_per_minute: float
    def __init__(self, env_utilisation: _Optional[float] = ..., rollout_utilisation: _Optional[float] = ..., trainer_utilisation: _Optional[float] = ..., trained_actions_per_minute: _Optional[float] = ..., sampled_actions_per_minute: _Optional[float] = ..., trained_tokens_per_minute: _Optional[float] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("counts", "usage", "success_rate", "success_by_task", "train_seconds")
    class SuccessByTaskEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_RATE_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_BY_TASK_FIELD_NUMBER: _ClassVar[int]
    TRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    counts: Counts
    usage: Usage
    success_rate: float
    success_by_task: _containers.ScalarMap[str, float]
    train_seconds: float
    def __init__(self, counts: _Optional[_Union[Counts, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., success_rate: _Optional[float] = ..., success_by_task: _Optional[_Mapping[str, float]] = ..., train_seconds: _Optional[float] = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("kind", "waits", "waits_for", "seconds", "culprit", "failure", "advice", "deliberate")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    DELIBERATE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    waits: str
    waits_for: str
    seconds: float
    culprit: str
    failure: str
    advice: str
    deliberate: bool
    def __init__(self, kind: _Optional[str] = ..., waits: _Optional[str] = ..., waits_for: _Optional[str] = ..., seconds: _Optional[float] = ..., culprit: _Optional[str] = ..., failure: _Optional[str] = ..., advice: _Optional[str] = ..., deliberate: bool = ...) -> None: ...

class Quarantined(_message.Message):
    __slots__ = ("kind", "name", "seconds_left", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    seconds_left: float
    reason: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., seconds_left: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("run_id", "phase", "update", "weight_version", "trajectories", "env_steps", "success_rate", "env_utilisation", "rollout_utilisation", "fates", "workers", "elapsed_seconds", "trainer_utilisation", "trained_actions_per_minute", "env_time", "rollout_time", "trainer_time", "figures", "activity", "share_done", "doing", "control_address", "quiet", "stalls", "quarantined", "paused")
    class FatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DoingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class QuietEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    ENV_STEPS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_RATE_FIELD_NUMBER: _ClassVar[int]
    ENV_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    FATES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_UTILISATION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ACTIONS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    ENV_TIME_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_TIME_FIELD_NUMBER: _ClassVar[int]
    TRAINER_TIME_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    SHARE_DONE_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: str
    update: int
    weight_version: int
    trajectories: int
    env_steps: int
    success_rate: float
    env_utilisation: float
    rollout_utilisation: float
    fates: _containers.ScalarMap[str, int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    elapsed_seconds: float
    trainer_utilisation: float
    trained_actions_per_minute: float
    env_time: TimeSpent
    rollout_time: TimeSpent
    trainer_time: TimeSpent
    figures: Figures
    activity: str
    share_done: float
    doing: _containers.ScalarMap[str, str]
    control_address: str
    quiet: _containers.ScalarMap[str, float]
    stalls: _containers.RepeatedCompositeFieldContainer[Stall]
    quarantined: _containers.RepeatedCompositeFieldContainer[Quarantined]
    paused: bool
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[str] = ..., update: _Optional[int] = ..., weight_version: _Optional[int] = ..., trajectories: _Optional[int] = ..., env_steps: _Optional[int] = ..., success_rate: _Optional[float] = ..., env_utilisation: _Optional[float] = ..., rollout_utilisation: _Optional[float] = ..., fates: _Optional[_Mapping[str, int]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., elapsed_seconds: _Optional[float] = ..., trainer_utilisation: _Optional[float] = ..., trained_actions_per_minute: _Optional[float] = ..., env_time: _Optional[_Union[TimeSpent, _Mapping]] = ..., rollout_time: _Optional[_Union[TimeSpent, _Mapping]] = ..., trainer_time: _Optional[_Union[TimeSpent, _Mapping]] = ..., figures: _Optional[_Union[Figures, _Mapping]] = ..., activity: _Optional[str] = ..., share_done: _Optional[float] = ..., doing: _Optional[_Mapping[str, str]] = ..., control_address: _Optional[str] = ..., quiet: _Optional[_Mapping[str, float]] = ..., stalls: _Optional[_Iterable[_Union[Stall, _Mapping]]] = ..., quarantined: _Optional[_Iterable[_Union[Quarantined, _Mapping]]] = ..., paused: bool = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("from_sequence",)
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    from_sequence: int
    def __init__(self, from_sequence: _Optional[int] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("sequence", "unix_seconds", "kind", "json")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    unix_seconds: float
    kind: str
    json: str
    def __init__(self, sequence: _Optional[int] = ..., unix_seconds: _Optional[float] = ..., kind: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...

class ListTrajectoriesRequest(_message.Message):
    __slots__ = ("task_name", "page_size", "page_token")
    TASK_NAME_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    task_name: str
    page_size: int
    page_token: str
    def __init__(self, task_name: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class TrajectorySummary(_message.Message):
    __slots__ = ("id", "group_id", "task_id", "reward", "success", "steps", "fate", "finished_unix_seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    group_id: str
    task_id: str
    reward: float
    success: bool
    steps: int
    fate: str
    finished_unix_seconds: float
    def __init__(self, id: _Optional[str] = ..., group_id: _Optional[str] = ..., task_id: _Optional[str] = ..., reward: _Optional[float] = ..., success: bool = ..., steps: _Optional[int] = ..., fate: _Optional[str] = ..., finished_unix_seconds: _Optional[float] = ...) -> None: ...

class ListTrajectoriesResponse(_message.Message):
    __slots__ = ("trajectories", "next_page_token")
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[TrajectorySummary]
    next_page_token: str
    def __init__(self, trajectories: _Optional[_Iterable[_Union[TrajectorySummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetTrajectoryRequest(_message.Message):
    __slots__ = ("id", "with_images")
    ID_FIELD_NUMBER: _ClassVar[int]
    WITH_IMAGES_FIELD_NUMBER: _ClassVar[int]
    id: str
    with_images: bool
    def __init__(self, id: _Optional[str] = ..., with_images: bool = ...) -> None: ...

class GetTrajectoryResponse(_message.Message):
    __slots__ = ("trajectory", "screenshots_removed")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    SCREENSHOTS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    trajectory: _trajectory_pb2.Trajectory
    screenshots_removed: bool
    def __init__(self, trajectory: _Optional[_Union[_trajectory_pb2.Trajectory, _Mapping]] = ..., screenshots_removed: bool = ...) -> None: ...

class SubmitTasksRequest(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Task]
    def __init__(self, tasks: _Optional[_Iterable[_Union[_trajectory_pb2.Task, _Mapping]]] = ...) -> None: ...

class SubmitTasksResponse(_message.Message):
    __slots__ = ("accepted",)
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    def __init__(self, accepted: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("path", "weight_version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    weight_version: int
    def __init__(self, path: _Optional[str] = ..., weight_version: _Optional[int] = ...) -> None: ...
