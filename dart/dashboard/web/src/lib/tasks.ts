/** What the rows of the table of tasks add up to. */
import type { TaskRow } from './records'

/** Null where there is nothing yet, and in a collection, which stores only its successes. */
export const successRate = (row: Pick<TaskRow, 'successes' | 'trajectories'>): number | null =>
  row.successes === null || !row.trajectories ? null : row.successes / row.trajectories
