/** What pages need to know of the list of runs. */
import type { RunRow } from './records'

/** The ids of the runs that can be opened. */
export const readable = (runs: readonly RunRow[]): string[] => runs.filter((run) => !run.problem).map((run) => run.id)
