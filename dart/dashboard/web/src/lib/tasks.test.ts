import { expect, it } from 'vitest'
import { successRate } from './tasks'

it('knows no success rate of a collection, nor of a task without trajectories', () => {
  expect(successRate({ successes: 2, trajectories: 8 })).toBe(0.25)
  expect(successRate({ successes: 0, trajectories: 0 })).toBeNull()
  expect(successRate({ successes: null, trajectories: 8 })).toBeNull()
})
