/* Generated from dart/inspection/records.py by `npm run types`. Do not edit. */

export type JsonValue = unknown

export interface Everything {
  Checkpoint: Checkpoint
  Comparison: Comparison
  Counts: Counts
  Curves: Curves
  Episodes: Episodes
  EvaluationPoint: EvaluationPoint
  EventPage: EventPage
  EventRow: EventRow
  Figures: Figures
  GroupDetail: GroupDetail
  ImageRef: ImageRef
  JsonValue: JsonValue
  Lane: Lane
  Mark: Mark
  Member: Member
  Pair: Pair
  PlanChange: PlanChange
  PoolEntry: PoolEntry
  Quarantined: Quarantined
  RunOverview: RunOverview
  RunRow: RunRow
  RunStatus: RunStatus
  Side: Side
  Span: Span
  StalenessCounts: StalenessCounts
  Stall: Stall
  Status: Status
  StepDetail: StepDetail
  StepGlance: StepGlance
  TaskDetail: TaskDetail
  TaskPoint: TaskPoint
  TaskRow: TaskRow
  TimeSpent: TimeSpent
  Timeline: Timeline
  TrajectoryDetail: TrajectoryDetail
  TrajectoryPage: TrajectoryPage
  TrajectoryRow: TrajectoryRow
  Usage: Usage
  WorkerStatus: WorkerStatus
}
export interface Checkpoint {
  path: string
  version: number
  created: number
  success_rate: number | null
}
export interface Comparison {
  first: Side
  second: Side
  pairs: Pair[]
  common: number
  only_first: number
  only_second: number
  difference: number
  low: number
  high: number
  p_value: number | null
}
/**
 * One evaluation of one run: the same policy on a list of instances.
 */
export interface Side {
  run: string
  evaluation: string
  title: string
  episodes: number
  success: number
}
/**
 * An instance that both sides have, with their trajectories (newest first).
 */
export interface Pair {
  suite: string
  task: string
  seed: number
  instruction: string
  first: TrajectoryRow[]
  second: TrajectoryRow[]
  first_success: number
  second_success: number
}
/**
 * One trajectory without its steps.
 */
export interface TrajectoryRow {
  id: string
  group: string
  kind: string
  suite: string
  task: string
  seed: number
  instruction: string
  termination: string
  reward: number
  success: boolean
  steps: number
  step_limit: number
  fate: string
  pooled_from: string
  attempt: number
  oldest_version: number | null
  newest_version: number | null
  started: number
  finished: number
  screenshots_kept: boolean
  thumbnail: string
}
/**
 * Counters of the whole run, including its earlier processes.
 */
export interface Counts {
  updates: number
  version: number
  trajectories: number
  env_steps: number
  weight_syncs: number
  infrastructure_failures: number
  unparsable: number
  pooled: number
  trained_steps: number
  trained_tokens: number
  fates: {
    [k: string]: number
  }
  staleness: StalenessCounts
  reading_rules: {
    [k: string]: number
  }
  prompt_tokens: number
  cached_tokens: number
}
/**
 * Staleness, in weight versions, of the trajectories that updates trained on.
 */
export interface StalenessCounts {
  sum: number
  max: number
  trajectories: number
}
/**
 * Numbers over updates. All lists have the same length, one entry for each update.
 */
export interface Curves {
  updates: number[]
  unix_seconds: number[]
  trajectories: number[]
  series: {
    [k: string]: (number | null)[]
  }
  by_task: {
    [k: string]: (number | null)[]
  }
  evaluations: EvaluationPoint[]
}
/**
 * A result on held-out instances.
 */
export interface EvaluationPoint {
  unix_seconds: number
  update: number
  label: string
  decoding: string
  temperature: number | null
  mean: number
  low: number
  high: number
  episodes: number
  not_evaluated: number
}
/**
 * Trajectories in as few lanes as ran at once, none if too many. A span's `detail` begins with the id.
 */
export interface Episodes {
  count: number
  lanes: Lane[]
}
/**
 * One worker's line in the timeline.
 */
export interface Lane {
  worker: string
  role: string
  spans: Span[]
  marks: Mark[]
}
/**
 * A worker's state from `start` to `end`; `end` None lasts until now.
 */
export interface Span {
  start: number
  end: number | null
  state: string
  detail: string
}
/**
 * Something that happened to a worker at one moment.
 */
export interface Mark {
  at: number
  kind: string
  text: string
  sequence: number | null
}
/**
 * Newest first.
 */
export interface EventPage {
  rows: EventRow[]
  next: number
  kinds: {
    [k: string]: number
  }
}
export interface EventRow {
  sequence: number
  unix_seconds: number
  kind: string
  text: string
  data: {
    [k: string]: JsonValue
  }
}
/**
 * A training run in numbers. `to_json` is the form in an "update" event, and `from_json` reads it back.
 */
export interface Figures {
  counts: Counts
  usage: Usage
  success_rate: number | null
  success_by_task: {
    [k: string]: number
  }
  train_seconds: number
}
/**
 * Utilisation (shares from 0 to 1) and throughput, since training began or was last resumed.
 */
export interface Usage {
  env_utilisation: number
  rollout_utilisation: number
  trainer_utilisation: number
  trained_actions_per_minute: number
  sampled_actions_per_minute: number
  trained_tokens_per_minute: number
}
export interface GroupDetail {
  id: string
  kind: string
  suite: string
  task: string
  seed: number
  planned: number
  plan: string
  state: string
  verdict: string
  opened: number
  closed: number | null
  update: number | null
  members: Member[]
}
export interface Member {
  row: TrajectoryRow
  advantages: number[]
  steps: StepGlance[]
}
/**
 * A step as it appears beside others.
 */
export interface StepGlance {
  index: number
  image: ImageRef | null
  action: {
    [k: string]: JsonValue
  } | null
  label: string
  advantage: number | null
}
/**
 * A picture, whose bytes are at /api/runs/RUN/images/SHA256.
 */
export interface ImageRef {
  sha256: string
  width: number
  height: number
  held: boolean
}
export interface PlanChange {
  at: number
  reason: string
}
export interface PoolEntry {
  trajectory: string
  steps: number
  finished: number
  newest_version: number | null
  uses: number
}
/**
 * What gets no work because it kept failing while others worked, or broke rules. `reason` may be a worker's
 * words.
 */
export interface Quarantined {
  kind: string
  name: string
  seconds_left: number
  reason: string
}
/**
 * What is known of a run as a whole.
 */
export interface RunOverview {
  run: RunRow
  config: {
    [k: string]: JsonValue
  }
  summary: {
    [k: string]: JsonValue
  } | null
  missing: string[]
  checkpoints: Checkpoint[]
  token_texts: boolean
}
/**
 * One line of the list of runs.
 */
export interface RunRow {
  id: string
  name: string
  kind: string
  state: string
  started: number
  finished: number | null
  directory: string
  updates: number
  trajectories: number
  success_rate: number | null
  problem: string
}
/**
 * What a run is doing now, or how it ended.
 */
export interface RunStatus {
  live: boolean
  status: Status
  why: string[]
}
export interface Status {
  run_id: string
  phase: string
  figures: Figures
  elapsed_seconds: number
  activity: string
  share_done: number
  env_time: TimeSpent
  rollout_time: TimeSpent
  trainer_time: TimeSpent
  workers: WorkerStatus[]
  doing: {
    [k: string]: string
  }
  control_address: string
  quiet: {
    [k: string]: number
  }
  stalls: Stall[]
  quarantined: Quarantined[]
  paused: boolean | null
}
/**
 * Slot-seconds of one kind of worker since training began or was last resumed, by state.
 */
export interface TimeSpent {
  seconds: {
    [k: string]: number
  }
  idle_because: {
    [k: string]: number
  }
  queued_because: {
    [k: string]: number
  }
}
/**
 * One connected worker. `worker_id` and `doing` may hold whatever a worker said: `inspection.wording.plain`
 * shows them.
 */
export interface WorkerStatus {
  worker_id: string
  role: string
  state: string
  slots: number
  busy: number
  weight_version: number
  seconds_since_heard: number
  doing: string
}
/**
 * Something that makes no progress, as found by `core.watchdog` or `core.learning.diagnosis`. `culprit` and
 * `failure` may be a worker's words.
 */
export interface Stall {
  kind: string
  waits: string
  waits_for: string
  seconds: number
  culprit: string
  failure: string
  advice: string
  deliberate: boolean
}
export interface StepDetail {
  index: number
  image: ImageRef | null
  text: string
  thought: string
  action: {
    [k: string]: JsonValue
  } | null
  label: string
  parse_error: string
  reading_rules: string
  truncated: boolean
  prompt_tokens: number
  prompt_images: number
  token_ids: number[]
  token_texts: string[] | null
  logprobs: number[]
  versions: [number, number, number][]
  advantage: number | null
  entropy: number | null
  selected: boolean | null
  token_entropies: number[]
  accessibility_tree: string
  last_action_error: string
}
export interface TaskDetail {
  row: TaskRow
  history: TaskPoint[]
  plans: PlanChange[]
  pool: PoolEntry[]
}
/**
 * A task in the table. Numbers are of training roll-outs without pooled copies; in a run without training, of its
 * evaluation, as are those of a task that only an evaluation has. Success is None where only successes are stored.
 */
export interface TaskRow {
  suite: string
  name: string
  trajectories: number
  successes: number | null
  recent_success: number | null
  mean_steps: number | null
  rollouts: number | null
  step_limit: number | null
  plan: string
  pooled: number
  copies: number
  last_finished: number | null
}
/**
 * A task's trajectories within one stretch of time.
 */
export interface TaskPoint {
  start: number
  end: number
  trajectories: number
  successes: number
  mean_steps: number
  step_limit: number
  rollouts: number
}
export interface Timeline {
  start: number
  end: number
  lanes: Lane[]
}
export interface TrajectoryDetail {
  row: TrajectoryRow
  goal_images: ImageRef[]
  evidence: {
    [k: string]: JsonValue
  } | null
  state_reward: number | null
  steps: StepDetail[]
  last_image: ImageRef | null
  siblings: TrajectoryRow[]
  older: string
  newer: string
  pooled_as: string[]
}
/**
 * Newest first.
 */
export interface TrajectoryPage {
  rows: TrajectoryRow[]
  next: string
}
