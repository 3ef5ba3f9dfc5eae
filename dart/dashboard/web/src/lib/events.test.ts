import { describe, expect, it } from 'vitest'
import { isTrouble, links, merged, taskOf } from './events'
import type { EventRow } from './records'

const event = (sequence: number, data: Record<string, unknown> = {}): EventRow => ({
  sequence,
  unix_seconds: 0,
  kind: 'group',
  text: '',
  data,
})

describe('events', () => {
  it('write tasks in two ways', () => {
    expect(taskOf('ladder/hard-03#576710')).toEqual({ suite: 'ladder', name: 'hard-03' })
    expect(taskOf('osworld/os/3ce0#7')).toEqual({ suite: 'osworld', name: 'os/3ce0' })
    expect(taskOf('os/3ce0')).toEqual({ suite: '', name: 'os/3ce0' })
    expect(taskOf('hard-03')).toEqual({ suite: '', name: 'hard-03' })
  })

  it('link to what they are about, each once', () => {
    const words = (data: Record<string, unknown>) => links('r', event(1, data)).map((link) => link.word)
    expect(words({ group: 'g1', task: 'ladder/hard#5' })).toEqual(['group g1', 'hard'])
    expect(words({ worker: 'env-0', replica: 'env-0', update: 3 })).toEqual(['env-0', 'update 3'])
    expect(words({ group: 'g1', success: 'g0-1', replaced: 'g1-2' })).toEqual(['group g1', 'success g0-1', 'replaced g1-2'])
    expect(words({ worker: 7, update: 'x' })).toEqual([])
    // The parameters are those that the pages read.
    expect(links('r', event(1, { task: 'hard' })).map((link) => link.href)).toEqual(['/runs/r/tasks?text=hard'])
    expect(links('r', event(1, { worker: 'env 0' })).map((link) => link.href)).toEqual(['/runs/r/workers?search=env+0'])
  })

  it('are merged without repeats', () => {
    const rows = (...all: number[]) => all.map((one) => event(one))
    expect(merged(rows(9, 8, 7), rows(8, 7, 6, 5)).map((row) => row.sequence)).toEqual([9, 8, 7, 6, 5])
    expect(merged([], rows(3, 2)).map((row) => row.sequence)).toEqual([3, 2])
    // An answer that was overtaken by a newer one takes nothing away.
    expect(merged(rows(8, 7), rows(9, 8, 7, 6)).map((row) => row.sequence)).toEqual([9, 8, 7, 6])
  })

  it('of trouble stand out', () => {
    expect(isTrouble('stalled')).toBe(true)
    expect(isTrouble('sync_started')).toBe(false)
  })
})
