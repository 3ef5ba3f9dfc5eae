import { render } from 'svelte/server'
import { expect, it } from 'vitest'
import type { RunStatus } from '../../lib/records'
import KeyNumbers from './KeyNumbers.svelte'

const status = (live: boolean): RunStatus =>
  ({
    live,
    status: {
      elapsed_seconds: 600,
      figures: { train_seconds: 7200, counts: { updates: 0, trajectories: 0, staleness: { trajectories: 0 } }, usage: {} },
    },
    why: [],
  }) as unknown as RunStatus

it('does not give the time of a resumed process as that of the run', () => {
  const shown = (live: boolean) => render(KeyNumbers, { props: { status: status(live), curves: undefined } }).body.replace(/<[^>]*>/g, '|')
  expect(shown(true)).toMatch(/Elapsed since its last start[| ]+10 min[| ]+2 h of training in all/)
  expect(shown(false)).toMatch(/Elapsed[| ]+10 min/)
})
