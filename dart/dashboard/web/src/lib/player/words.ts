/** Fates and endings in plain words. */
import { count, number } from '../format'
import type { GroupDetail, Member } from '../records'

const FATES: Record<string, string> = {
  trained: 'An update has trained on it.',
  evaluated: 'It belongs to an evaluation; nothing is trained on it.',
  collected: 'It is a collected success: an example for imitation, or for the experience pool.',
}

/** By the kind of its group: while the run goes on, and once it has ended. */
const PENDING: Record<string, readonly [string, string]> = {
  training: ['Its group is not decided yet, or waits for the trainer.', 'The run ended before an update took its group.'],
  evaluation: ['Its evaluation is not over.', 'The run ended before its evaluation was over.'],
  collected: ['Its collection is not over.', 'The run ended before its collection was over.'],
}

/** Causes of `core.curation.judging`, as the rest of "It was not trained on". */
const CAUSES: Record<string, string> = {
  'all succeeded': ', because its whole group succeeded: none did better than the others, so there was nothing to learn from',
  'all failed': ', because its whole group failed: none did better than the others, so there was nothing to learn from',
  'equal rewards': ', because its whole group had the same reward: none did better than the others, so there was nothing to learn from',
  stale: ', because the policy had changed too much since it, or one of its group, was sampled',
  'replaced by a pooled success': ': its whole group failed, and an earlier success from the experience pool stood in for it',
  'cannot be trained on': ', because its group has something that cannot be: the group’s verdict says what',
  'its screenshots are no longer kept': ', because its screenshots were removed before an update could use them',
}

/** Why the trajectory was kept or not, in a sentence. `kind`: its group's. `ended`: its run is over. */
export function fateSentence(fate: string, kind: string, ended: boolean): string {
  if (fate === 'pending') return PENDING[kind]?.[ended ? 1 : 0] ?? fate
  if (!fate.startsWith('dropped')) return FATES[fate] ?? fate
  const cause = fate.replace(/^dropped:?\s*/, '')
  return `It was not trained on${CAUSES[cause] ?? `: ${cause || 'no reason was recorded'}`}.`
}

type Rollouts = Pick<GroupDetail, 'kind' | 'planned' | 'closed'> & { members: readonly Pick<Member, 'row'>[] }

/** How many of a group's planned roll-outs there are; of collected ones only the successes are stored. The copy of a
    pooled success is none. */
export function rollouts({ kind, planned, closed, members }: Rollouts): string {
  if (kind === 'collected') return count(members.length, 'kept success', 'kept successes')
  const copies = members.filter((member) => member.row.pooled_from).length
  const missing = closed !== null ? planned - (members.length - copies) : 0
  const never = missing > 0 ? `, ${number(missing)} never finished` : ''
  return `${members.length - copies} of ${planned} roll-outs${never}${copies ? `, and ${count(copies, 'pooled success', 'pooled successes')}` : ''}`
}

const ENDINGS: Record<string, string> = {
  environment: 'the environment ended it',
  finished: 'the policy declared it finished',
  step_limit: 'it reached its step limit',
  unparsable: 'the policy’s text was no action',
  context_full: 'its next prompt would not have fitted into the context',
}

export const ending = (termination: string): string => ENDINGS[termination] ?? termination

/** Weight versions of a trajectory: "12" or "11 to 12"; a dash where nothing was sampled. */
export const versions = (oldest: number | null, newest: number | null): string =>
  oldest === null ? '–' : oldest === newest ? String(oldest) : `${oldest} to ${newest}`

/** An id by its end, which is where ids differ. */
export const tail = (id: string): string => (id.length > 14 ? `…${id.slice(-13)}` : id)

const AFTER: Record<string, string> = {
  environment: 'This action ended the episode: the screen after it is not kept.',
  step_limit: 'This was the last step that the limit allows: the screen after it is not kept.',
  context_full: 'There was no room for another turn after this action: the screen after it is not kept.',
}

/** What the last picture of a trajectory shows: the screen `after` the last action, or the last step's screenshot. Only
    the endings above carry an action out after that. */
export const lastScreen = (termination: string, after: boolean): string =>
  after ? 'This is the screen after the last action.' : (AFTER[termination] ?? 'No action followed: this is the last screen.')

/** Signed, for advantages: "+0.52", "−1.20". */
export const signed = (value: number): string => `${value < 0 ? '−' : '+'}${Math.abs(value).toFixed(2)}`
