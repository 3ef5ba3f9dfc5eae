"""What each page shows. The dashboard sends these as JSON, field by field; `dart/dashboard/web/src/lib/api.ts` is
generated from them (`npm run types`).

Times are Unix seconds, durations seconds, success rates and utilisations shares from 0 to 1. Points on a screenshot are
fractions of its width and height, as in `core.action`. Texts may be a model's, a world's or a worker's own words: show
them as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from dart.core.status import Status

# ---- runs ----


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the list of runs."""

    id: str
    name: str
    kind: str
    """ "training", "evaluation" or "collection"."""
    state: str
    """ "running", "finished", "interrupted" or "failed"."""
    started: float
    finished: float | None
    directory: str
    updates: int
    trajectories: int
    success_rate: float | None
    """That of the last training trajectories; an evaluation's mean. None before there is any."""
    problem: str = ""
    """Why the run cannot be opened, in a sentence; the numbers are then 0. Empty if it can."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: str
    version: int
    created: float
    success_rate: float | None


@dataclass(frozen=True, slots=True)
class RunOverview:
    """What is known of a run as a whole."""

    run: RunRow
    config: Mapping[str, JsonValue]
    summary: Mapping[str, JsonValue] | None
    """`summary.json`, once the run has finished. Both are without secrets."""
    missing: tuple[str, ...]
    """What is not there, a sentence each: screenshots that were removed, an interrupted end, an older schema."""
    checkpoints: tuple[Checkpoint, ...]
    token_texts: bool
    """Whether tokens can be shown as text here (`StepDetail.token_texts`)."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What a run is doing now, or how it ended."""

    live: bool
    """True if its coordinator answered; else `status` is that of the last update."""
    status: Status
    why: tuple[str, ...]
    """The lines of `dart why`; empty if nothing is wrong."""


# ---- curves ----


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """A result on held-out instances."""

    unix_seconds: float
    update: int
    label: str
    """ "before", "during", "after"; "eval" for `dart eval`."""
    decoding: str
    """ "sampled" or "greedy"; empty where a run has one."""
    temperature: float | None
    mean: float
    low: float
    """`low` to `high` is the 95 % interval."""
    high: float
    episodes: int
    not_evaluated: int = 0
    """Episodes of instances that had no result, and are in no mean."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Numbers over updates. All lists have the same length, one entry for each update."""

    updates: tuple[int, ...]
    unix_seconds: tuple[float, ...]
    trajectories: tuple[int, ...]
    """Training trajectories so far, at each update."""
    series: Mapping[str, tuple[float | None, ...]]
    """By name: those of the "update" event ("success_rate", "env_utilisation", ...) and the trainer's ("entropy",
    "kl_reference", "clip_fraction", "importance_weight", "tokens_per_second", "staleness", ...)."""
    by_task: Mapping[str, tuple[float | None, ...]]
    """Recent success of each task; at most 64 tasks."""
    evaluations: tuple[EvaluationPoint, ...]


# ---- workers ----


@dataclass(frozen=True, slots=True)
class Span:
    """A worker's state from `start` to `end`; `end` None lasts until now."""

    start: float
    end: float | None
    state: str
    """ "ready", "lost", "syncing", "training", "quarantined", ..."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a worker at one moment."""

    at: float
    kind: str
    """ "version", "failure", "violation", "missing", "left out", "stall", "remark", "checkpoint"."""
    text: str
    sequence: int | None = None
    """The event that says so."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One worker's line in the timeline."""

    worker: str
    role: str
    """ "env", "rollout" or "train"; "episode" for trajectories that ran one after the other."""
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    start: float
    end: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Episodes:
    """Trajectories in as few lanes as ran at once, none if too many. A span's `detail` begins with the id."""

    count: int
    lanes: tuple[Lane, ...]


# ---- trajectories ----


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One trajectory without its steps."""

    id: str
    group: str
    kind: str
    """Its group's: "training", "evaluation" or "collected"."""
    suite: str
    task: str
    seed: int
    instruction: str
    termination: str
    reward: float
    success: bool
    steps: int
    step_limit: int
    fate: str
    """ "trained", "pending", "evaluated", "collected" or "dropped: " and the reason."""
    pooled_from: str
    attempt: int
    oldest_version: int | None
    newest_version: int | None
    started: float
    finished: float
    screenshots_kept: bool
    thumbnail: str
    """The digest of the last screen that it shows; empty if there is none, or none any more."""


@dataclass(frozen=True, slots=True)
class TrajectoryPage:
    """Newest first."""

    rows: tuple[TrajectoryRow, ...]
    next: str
    """The `after` of the next page; empty if this is the last one."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A picture, whose bytes are at /api/runs/RUN/images/SHA256."""

    sha256: str
    width: int
    height: int
    held: bool
    """False if the run's directory no longer has its bytes."""


@dataclass(frozen=True, slots=True)
class StepGlance:
    """A step as it appears beside others."""

    index: int
    image: ImageRef | None
    action: Mapping[str, JsonValue] | None
    """As `core.action_json` writes it; None if the text could not be parsed."""
    label: str
    """The action in a few words, or why there is none: "click (0.50, 0.25)"."""
    advantage: float | None


@dataclass(frozen=True, slots=True)
class StepDetail:
    index: int
    image: ImageRef | None
    """What the policy saw at this step; earlier screenshots of its prompt are those of earlier steps."""
    text: str
    """What the policy wrote."""
    thought: str
    """The part of `text` before the action, if the grammar has one; else empty."""
    action: Mapping[str, JsonValue] | None
    label: str
    parse_error: str
    reading_rules: str
    truncated: bool
    prompt_tokens: int
    prompt_images: int
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...] | None
    """One per token; None if no tokenizer is at hand."""
    logprobs: tuple[float, ...]
    """One per token, of the policy that sampled it; empty where nothing was sampled."""
    versions: tuple[tuple[int, int, int], ...]
    """(weight version, first token, one past the last)."""
    advantage: float | None
    entropy: float | None
    """Before its update, the mean over its tokens, in nats; None where every step trains, or none has yet."""
    selected: bool | None
    """For training: its entropy reached the quantile of its group's steps; None as above."""
    token_entropies: tuple[float, ...]
    """In nats, one per token; empty where unknown."""
    accessibility_tree: str
    last_action_error: str


@dataclass(frozen=True, slots=True)
class TrajectoryDetail:
    row: TrajectoryRow
    goal_images: tuple[ImageRef, ...]
    evidence: Mapping[str, JsonValue] | None
    """The world's own evidence for the verdict."""
    state_reward: float | None
    """The world's verdict on the state that an episode left behind whose reward is 0 for another reason."""
    steps: tuple[StepDetail, ...]
    last_image: ImageRef | None
    """The screen after the last action; None if no action followed the last step's screenshot, or it was not kept."""
    siblings: tuple[TrajectoryRow, ...]
    """The group's trajectories, this one among them."""
    older: str
    """The task's previous trajectory; empty if there is none."""
    newer: str
    pooled_as: tuple[str, ...]
    """The copies of it that replaced failures."""


# ---- groups ----


@dataclass(frozen=True, slots=True)
class Member:
    row: TrajectoryRow
    advantages: tuple[float, ...]
    """One per step; empty if none were computed."""
    steps: tuple[StepGlance, ...]


@dataclass(frozen=True, slots=True)
class GroupDetail:
    id: str
    kind: str
    suite: str
    task: str
    seed: int
    planned: int
    plan: str
    """Why this many roll-outs, and why this step limit."""
    state: str
    """ "open", "released", "consumed", "dropped", "evaluated" or "collected"."""
    verdict: str
    """Why it is in this state."""
    opened: float
    closed: float | None
    update: int | None
    """The update that trained on it."""
    members: tuple[Member, ...]


# ---- tasks ----


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task in the table. Numbers are of training roll-outs without pooled copies; in a run without training, of its
    evaluation, as are those of a task that only an evaluation has. Success is None where only successes are stored."""

    suite: str
    name: str
    trajectories: int
    successes: int | None
    recent_success: float | None
    """The success rate of its last 32 trajectories."""
    mean_steps: float | None
    rollouts: int | None
    """The number of roll-outs that its last group was planned with."""
    step_limit: int | None
    """That of its last trajectory."""
    plan: str
    """Why: its last group's plan."""
    pooled: int
    """Its successes that the experience pool holds for it."""
    copies: int
    """How often one of them has replaced a failure."""
    last_finished: float | None


@dataclass(frozen=True, slots=True)
class TaskPoint:
    """A task's trajectories within one stretch of time."""

    start: float
    end: float
    trajectories: int
    successes: int
    mean_steps: float
    step_limit: float
    rollouts: float
    """The mean size that their groups were planned with."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class PoolEntry:
    trajectory: str
    steps: int
    finished: float
    newest_version: int | None
    uses: int


@dataclass(frozen=True, slots=True)
class TaskDetail:
    row: TaskRow
    history: tuple[TaskPoint, ...]
    """At most 60 stretches with equally many trajectories each, oldest first."""
    plans: tuple[PlanChange, ...]
    """Changes of its number of roll-outs and its step limit, newest first."""
    pool: tuple[PoolEntry, ...]


# ---- events ----


@dataclass(frozen=True, slots=True)
class EventRow:
    sequence: int
    unix_seconds: float
    kind: str
    text: str
    """The event in a sentence."""
    data: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class EventPage:
    """Newest first."""

    rows: tuple[EventRow, ...]
    next: int
    """The `before` of the next page; 0 if this is the last one."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """How many events of each kind the run has; only with the first page."""


# ---- comparing ----


@dataclass(frozen=True, slots=True)
class Side:
    """One evaluation of one run: the same policy on a list of instances."""

    run: str
    evaluation: str
    """The part of the run's groups that it consists of, as `comparison.sides` lists them."""
    title: str
    """ "after training, greedy"."""
    episodes: int
    success: float


@dataclass(frozen=True, slots=True)
class Pair:
    """An instance that both sides have, with their trajectories (newest first)."""

    suite: str
    task: str
    seed: int
    instruction: str
    first: tuple[TrajectoryRow, ...]
    second: tuple[TrajectoryRow, ...]
    first_success: float
    second_success: float


@dataclass(frozen=True, slots=True)
class Comparison:
    first: Side
    second: Side
    pairs: tuple[Pair, ...]
    """Those where the sides differ most come first; at most 2,000."""
    common: int
    only_first: int
    """Instances where the first side succeeds more often than the second."""
    only_second: int
    difference: float
    """Mean success of the second side minus that of the first, on common instances."""
    low: float
    high: float
    p_value: float | None
