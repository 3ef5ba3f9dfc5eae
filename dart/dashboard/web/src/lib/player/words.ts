/** Fates and endings in plain words. */

const FATES: Record<string, string> = {
  trained: 'An update has trained on it.',
  pending: 'Its group is not decided yet, or waits for the trainer.',
  evaluated: 'It belongs to an evaluation; nothing is trained on it.',
  collected: 'It came from elsewhere, for the experience pool.',
}

/** Why the trajectory was kept or not, in a sentence. */
export function fateSentence(fate: string): string {
  if (fate.startsWith('dropped')) return `It was not trained on: ${fate.replace(/^dropped:?\s*/, '') || 'no reason was recorded'}.`
  return FATES[fate] ?? fate
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

/** Signed, for advantages: "+0.52", "−1.20". */
export const signed = (value: number): string => `${value < 0 ? '−' : '+'}${Math.abs(value).toFixed(2)}`
