/** States and fates with their words and colours, defined once. A tone names the tokens `--TONE` and `--TONE-soft`. */
import type { Quarantined, Stall } from './records'

export type Tone = 'good' | 'bad' | 'warn' | 'info' | 'neutral'

const RUN_TONES: Record<string, Tone> = { running: 'info', finished: 'good', interrupted: 'warn', failed: 'bad' }
export const runTone = (state: string): Tone => RUN_TONES[state] ?? 'neutral'

const WORKER_TONES: Record<string, Tone> = {
  ready: 'good',
  starting: 'neutral',
  syncing: 'info',
  lost: 'bad',
  quarantined: 'warn',
  probing: 'warn',
}
export const workerTone = (state: string): Tone => WORKER_TONES[state] ?? 'neutral'

/** "trained", "pending", "evaluated", "collected" or "dropped: " and the reason. */
export function fateTone(fate: string): Tone {
  if (fate === 'trained') return 'good'
  if (fate.startsWith('dropped')) return 'warn'
  return fate === 'evaluated' ? 'info' : 'neutral'
}

/** The colour of a fate in a bar: trained and pending by name, each reason for dropping in its own colour. */
export function fateColour(fate: string, index: number): string {
  if (fate === 'trained') return 'var(--state-acting)'
  if (fate === 'pending') return 'var(--state-idle)'
  if (fate === 'evaluated') return 'var(--state-generating)'
  const reasons = ['--state-queued', '--state-quarantined', '--state-resetting', '--state-lost', '--state-missing']
  return `var(${reasons[index % reasons.length]})`
}

export const outcomeTone = (success: boolean): Tone => (success ? 'good' : 'bad')
export const outcomeWord = (success: boolean): string => (success ? 'success' : 'failure')

const STATES = [
  'acting',
  'generating',
  'queued',
  'resetting',
  'renewing',
  'booting',
  'idle',
  'quarantined',
  'missing',
  'lost',
  'syncing',
  'training',
  'ready',
] as const

const SAME: Record<string, (typeof STATES)[number]> = {
  starting: 'booting',
  probing: 'quarantined',
  serving: 'generating',
  busy: 'generating',
  waiting: 'idle',
  stepping: 'training',
  success: 'acting',
  failure: 'lost',
}

/** The token that holds the colour of a slot's, replica's or trainer's state. */
export function stateToken(state: string): string {
  const known = (STATES as readonly string[]).includes(state) ? state : SAME[state]
  return `--state-${known ?? 'other'}`
}

/** Order of states in bars and legends: work first, then waiting, then trouble. */
export function byWork(a: string, b: string): number {
  const at = (state: string) => {
    const index = (STATES as readonly string[]).indexOf(state)
    return index < 0 ? STATES.length : index
  }
  return at(a) - at(b) || a.localeCompare(b)
}

/** Whether a person has paused sampling. The watchdog's stall comes minutes later: it only stands in for a status of an
    older dart, which does not say `paused`. */
export const isPaused = (status: { paused?: boolean | null; stalls: readonly Pick<Stall, 'kind'>[] }): boolean =>
  status.paused ?? status.stalls.some((stall) => stall.kind === 'paused')

/** What stands above the lines that say what is wrong. `calm`: nothing is; `early`: it may still be chance. */
export function whyTitle(live: boolean, calm: boolean, phase: string, early = false): string {
  if (calm && early) return 'It is too early to tell'
  if (calm) return phase === 'interrupted' ? 'Somebody stopped it' : 'It waits, as somebody asked'
  if (live) return 'Something is wrong'
  return phase === 'running' ? 'It runs, but cannot be asked what it does' : 'Why it ended, and what was wrong'
}

/** The connected worker that a culprit begins with, if it is one: "env-10, which ..." is not "env-1". */
export const culpritWorker = (culprit: string, workers: readonly { worker_id: string }[]): string =>
  workers.find(({ worker_id: id }) => culprit === id || (culprit.startsWith(id) && !/[\w.-]/.test(culprit[id.length] ?? '')))
    ?.worker_id ?? ''

/** Why tasks get no roll-outs for now, by their names. */
export const restingTasks = (quarantined: readonly Quarantined[]): ReadonlyMap<string, string> =>
  new Map(quarantined.filter((one) => one.kind === 'task').map((one) => [one.name, one.reason]))

export const ROLE_WORDS: Record<string, string> = { env: 'Environments', rollout: 'Replicas', train: 'Trainer', episode: 'Episodes' }
export const ROLE_ORDER: readonly string[] = ['env', 'rollout', 'train', 'episode']
