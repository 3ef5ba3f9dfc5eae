import { describe, expect, it } from 'vitest'
import { culpritWorker, isPaused, restingTasks, whyTitle } from './states'

describe('what is wrong', () => {
  it('has a heading that is true', () => {
    expect(whyTitle(true, false, 'training')).toBe('Something is wrong')
    expect(whyTitle(true, true, 'training')).toBe('It waits, as somebody asked')
    expect(whyTitle(true, true, 'training', true)).toBe('It is too early to tell')
    expect(whyTitle(false, true, 'interrupted')).toBe('Somebody stopped it')
    expect(whyTitle(false, false, 'interrupted')).toMatch(/^Why it ended/)
    expect(whyTitle(false, false, 'running')).not.toMatch(/ended/)
  })

  it('links to the worker that is meant', () => {
    const workers = [{ worker_id: 'env-1' }, { worker_id: 'env-10' }, { worker_id: 'gpu 3' }]
    expect(culpritWorker('env-10, env-1', workers)).toBe('env-10')
    expect(culpritWorker('env-1: the display is gone', workers)).toBe('env-1')
    expect(culpritWorker('gpu 3', workers)).toBe('gpu 3')
    expect(culpritWorker('env-12', workers)).toBe('')
    expect(culpritWorker('', workers)).toBe('')
  })

  it('is that somebody paused the run, before the watchdog says so and after', () => {
    const stalls = [{ kind: 'paused' }]
    expect(isPaused({ paused: true, stalls: [] })).toBe(true)
    expect(isPaused({ paused: false, stalls })).toBe(false)
    // A coordinator of an older dart does not say it.
    expect(isPaused({ stalls })).toBe(true)
    expect(isPaused({ stalls: [{ kind: 'update' }] })).toBe(false)
  })

  it('says why a task rests', () => {
    const one = { seconds_left: 9, reason: 'no browser' }
    const all = [{ ...one, kind: 'task', name: 'a' }, { ...one, kind: 'worker', name: 'b' }]
    expect([...restingTasks(all)]).toEqual([['a', 'no browser']])
  })
})
