import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import { Live } from './stream.svelte'

class Source {
  static readonly CLOSED = 2
  static last: Source
  static made = 0
  readyState = 1
  onopen: (() => void) | null = null
  onerror: (() => void) | null = null
  readonly takers = new Map<string, (event: { data: string }) => void>()
  constructor(readonly address: string) {
    Source.last = this
    Source.made++
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

class Tab extends EventTarget {
  hidden = false
  turn(hidden: boolean): void {
    this.hidden = hidden
    this.dispatchEvent(new Event('visibilitychange'))
  }
}
let tab: Tab
const open = () => Source.last.readyState !== Source.CLOSED

beforeEach(() => {
  vi.useFakeTimers()
  tab = new Tab()
  Source.made = 0
  vi.stubGlobal('EventSource', Source)
  vi.stubGlobal('document', tab)
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
  const pulse = { last: 77, updates: 2, trajectories: 25, state: 'running' }
  const answers: Record<string, unknown> = {
    '/api/runs/r/status': { live: true, status: { figures: { counts: { updates: 2, trajectories: 5 } } }, why: [] },
    '/api/runs/r/pulse': pulse,
  }
  vi.stubGlobal('fetch', (address: string) => Promise.resolve(new Response(JSON.stringify(answers[address]))))
  const live = watched()
  for (let i = 0; i < 3; i++) Source.last.onerror?.()
  await vi.advanceTimersByTimeAsync(100)
  expect(live.connection).toBe('polling')
  expect(live.pulse).toEqual(pulse)
  live.stop()
  expect(vi.getTimerCount()).toBe(0)
})

const events = (last: number, state = 'running') => ({ last, updates: last, trajectories: 8 * last, state })

it('lets go of its connection some seconds after the tab is hidden, and connects again when it is seen', () => {
  const live = watched()
  Source.last.send('events', events(1))
  tab.turn(true)
  vi.advanceTimersByTime(4000)
  expect(open()).toBe(true)
  vi.advanceTimersByTime(60_000)
  expect([open(), vi.getTimerCount(), Source.made]).toEqual([false, 0, 1])
  tab.turn(false)
  expect([open(), Source.made, live.pulse?.last]).toEqual([true, 2, 1])
  Source.last.send('events', events(9))
  expect(live.pulse?.last).toBe(9)
  live.stop()
  tab.turn(true)
  tab.turn(false)
  expect([Source.made, vi.getTimerCount()]).toEqual([2, 0])
})

it('keeps the connection of a reader who only glances at another tab, and tells what came meanwhile', () => {
  const live = watched()
  Source.last.send('events', events(1))
  Source.last.send('events', events(2)) // waits, because the first is not two seconds old
  tab.turn(true)
  vi.advanceTimersByTime(3000)
  Source.last.send('events', events(3))
  Source.last.send('ended', { state: 'interrupted' })
  expect([live.pulse?.last, live.ended]).toEqual([1, false])
  tab.turn(false)
  expect([live.pulse?.last, live.ended]).toEqual([3, true])
  live.stop()
})

it('connects to nothing in a tab that is opened in the background', () => {
  tab.hidden = true
  const live = new Live('r')
  live.watchers = 1
  live.start()
  expect(Source.made).toBe(0)
  tab.turn(false)
  expect(Source.made).toBe(1)
  live.stop()
})

it('asks for nothing in a tab that is hidden, also where the stream is broken', async () => {
  const fetched = vi.fn(() => Promise.reject(new TypeError('offline')))
  vi.stubGlobal('fetch', fetched)
  const live = watched()
  for (let i = 0; i < 3; i++) Source.last.onerror?.()
  await vi.advanceTimersByTimeAsync(6000)
  expect(fetched.mock.calls.length).toBe(4)
  tab.turn(true)
  Source.last.onerror?.()
  await vi.advanceTimersByTimeAsync(60_000)
  expect([fetched.mock.calls.length, open(), vi.getTimerCount()]).toEqual([4, false, 0])
  tab.turn(false)
  expect([open(), live.connection]).toEqual([true, 'connecting'])
  live.stop()
})

it('takes a run that was interrupted while nobody looked for running again', () => {
  const live = watched()
  Source.last.send('ended', { state: 'interrupted' })
  tab.turn(true)
  vi.advanceTimersByTime(60_000)
  tab.turn(false)
  Source.last.send('events', events(5))
  expect([live.ended, live.pulse?.last]).toEqual([false, 5])
  live.stop()
})

it('does not ask a run that has finished again', () => {
  const live = watched()
  Source.last.send('ended', { state: 'finished' })
  tab.turn(true)
  vi.advanceTimersByTime(60_000)
  tab.turn(false)
  expect([live.ended, live.connection, Source.made]).toEqual([true, 'open', 1])
  live.stop()
  // Until a page watches it again.
  live.start()
  tab.turn(true)
  vi.advanceTimersByTime(60_000)
  expect([Source.made, open()]).toEqual([2, false])
  live.stop()
})

/** Answers everything with the pulse of a run that is running. */
const answering = (address: string) => Promise.resolve(new Response(JSON.stringify({ address, ...events(3) })))

it('notices that a connection is only half open, and makes another', async () => {
  const live = watched()
  const first = Source.last
  first.onopen?.()
  first.send('events', events(1))
  await vi.advanceTimersByTimeAsync(20_000)
  first.send('heartbeat', {}) // of a run that says nothing new
  await vi.advanceTimersByTimeAsync(20_000)
  expect([live.connection, open()]).toEqual(['open', true])
  let answers: () => void = () => {}
  vi.stubGlobal('fetch', async (address: string) => {
    await new Promise<void>((resolve) => (answers = chain(answers, resolve)))
    return answering(address)
  })
  await vi.advanceTimersByTimeAsync(15_000)
  expect([first.readyState, live.connection, Source.made]).toEqual([Source.CLOSED, 'polling', 1])
  answers()
  await vi.advanceTimersByTimeAsync(0)
  expect([Source.made, Source.last === first, live.pulse?.updates]).toEqual([2, false, 3])
  Source.last.onopen?.()
  expect(live.connection).toBe('open')
  live.stop()
  expect(vi.getTimerCount()).toBe(0)
})

const chain = (one: () => void, two: () => void) => () => (one(), two())

it('asks once at a time while nothing answers, so that connections are left for others', async () => {
  const fetched = vi.fn(() => new Promise<Response>(() => {}))
  vi.stubGlobal('fetch', fetched)
  const live = watched()
  await vi.advanceTimersByTimeAsync(90_000)
  expect(live.connection).toBe('polling')
  expect(fetched.mock.calls.length).toBe(2)
  live.stop()
})
