/** What pages need to know of the list of runs. */
import type { RunRow } from './records'

/** The runs that can be opened, each once: a copy of a run has its id. */
export const readable = (runs: readonly RunRow[]): string[] => [
  ...new Set(runs.filter((run) => !run.problem).map((run) => run.id)),
]
