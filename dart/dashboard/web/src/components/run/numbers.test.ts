import { render } from 'svelte/server'
import { expect, it } from 'vitest'
import type { RunStatus } from '../../lib/records'
import Hero from './Hero.svelte'
import KeyNumbers from './KeyNumbers.svelte'

const status = (live: boolean, updates = 0, success_rate?: number | null): RunStatus =>
  ({
    live,
    status: {
      elapsed_seconds: 600,
      figures: { train_seconds: 7200, success_rate, counts: { updates, trajectories: 0, fates: { trained: 1200 }, staleness: { trajectories: 0 } }, usage: {} },
    },
    why: [],
  }) as unknown as RunStatus
const shown = (of: RunStatus) =>
  [Hero, KeyNumbers].map((part) => render(part, { props: { status: of, curves: undefined } }).body.replace(/<[^>]*>/g, '|')).join('')

it('does not give the time of a resumed process as that of the run', () => {
  expect(shown(status(true))).toMatch(/Elapsed since its last start[| ]+10 min[| ]+2 h of training in all/)
  expect(shown(status(false))).toMatch(/Elapsed[| ]+10 min/)
})

it('gives no success of a run that samples nothing, as in imitation', () => {
  expect(shown(status(true, 3, 0))).toMatch(/Training success[| ]+0.0 %/)
  expect(shown(status(true, 3, null))).toMatch(/Updates[| ]+3/)
  expect(shown(status(true, 3, null))).not.toContain('Training success')
  expect(shown(status(true, 3, null))).toMatch(/Demonstrations trained on[| ]+1,200/)
  expect(shown(status(true, 3))).not.toContain('Training success')
})
