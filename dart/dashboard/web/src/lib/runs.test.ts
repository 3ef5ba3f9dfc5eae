import { expect, it } from 'vitest'
import type { RunRow } from './records'
import { readable } from './runs'

it('lists no run that cannot be opened', () => {
  const run = (id: string, problem = '') => ({ id, problem }) as RunRow
  expect(readable([run('a'), run('b', 'damaged'), run('c')])).toEqual(['a', 'c'])
})
