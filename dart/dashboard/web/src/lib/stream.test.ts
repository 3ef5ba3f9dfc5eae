import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import { Live } from './stream.svelte'

class Source {
  static readonly CLOSED = 2
  static last: Source
  readyState = 1
  onopen: (() => void) | null = null
  onerror: (() => void) | null = null
  readonly takers = new Map<string, (event: { data: string }) => void>()
  constructor(readonly address: string) {
    Source.last = this
  }
  addEventListener(kind: string, take: (event: { data: string }) => void): void {
    this.takers.set(kind, take)
  }
  send(kind: string, data: unknown): void {
    this.takers.get(kind)?.({ data: JSON.stringify(data) })
  }
  close(): void {
    this.readyState = Source.CLOSED
  }
}

beforeEach(() => {
  vi.useFakeTimers()
  vi.stubGlobal('EventSource', Source)
})
afterEach(() => {
  vi.useRealTimers()
  vi.unstubAllGlobals()
})

const watched = () => {
  const live = new Live('r')
  live.watchers = 1
  live.start()
  return live
}

it('tells how far a run came that ends right after it has told something', () => {
  const live = watched()
  Source.last.send('events', { last: 1, updates: 1, trajectories: 8, state: 'running' })
  vi.advanceTimersByTime(500)
  Source.last.send('events', { last: 9, updates: 2, trajectories: 16, state: 'finished' })
  Source.last.send('ended', { state: 'finished' })
  expect([live.ended, live.pulse?.trajectories, live.pulse?.last]).toEqual([true, 16, 9])
  expect(vi.getTimerCount()).toBe(0)
})

it('notices that a run which was interrupted goes on', async () => {
  let state = 'interrupted'
  vi.stubGlobal('document', { hidden: false })
  vi.stubGlobal('fetch', () => Promise.resolve(new Response(JSON.stringify({ run: { state } }))))
  const live = watched()
  const first = Source.last
  first.send('ended', { state })
  await vi.advanceTimersByTimeAsync(20_000)
  expect([live.ended, Source.last]).toEqual([true, first])
  state = 'running'
  await vi.advanceTimersByTimeAsync(15_000)
  expect(Source.last).not.toBe(first)
  Source.last.send('events', { last: 1, updates: 1, trajectories: 8, state })
  expect(live.ended).toBe(false)
  live.stop()
  expect(vi.getTimerCount()).toBe(0)
})

it('counts the same while it polls as in the stream', async () => {
  const answers: Record<string, unknown> = {
    '/api/runs/r/status': { live: true, status: { figures: { counts: { updates: 2, trajectories: 5 } } }, why: [] },
    '/api/runs/r': { run: { updates: 2, trajectories: 25 } },
    '/api/runs/r/events?limit=1': { rows: [{ sequence: 77 }] },
  }
  vi.stubGlobal('fetch', (address: string) => Promise.resolve(new Response(JSON.stringify(answers[address]))))
  const live = watched()
  for (let i = 0; i < 3; i++) Source.last.onerror?.()
  await vi.advanceTimersByTimeAsync(100)
  expect(live.connection).toBe('polling')
  // Of the run, with its evaluations and copies, as a pulse says it.
  expect(live.pulse).toEqual({ last: 77, updates: 2, trajectories: 25 })
  live.stop()
  expect(vi.getTimerCount()).toBe(0)
})
