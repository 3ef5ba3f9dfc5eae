import { expect, it } from 'vitest'
import type { RunRow } from './records'
import { readable } from './runs'

it('lists copies of a run once, and none that cannot be opened', () => {
  const run = (id: string, problem = '') => ({ id, problem }) as RunRow
  expect(readable([run('a'), run('b', 'damaged'), run('a'), run('c')])).toEqual(['a', 'c'])
})
