import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { tickText } from './paint'
import type { Lane, Mark, Span, Timeline } from './records'
import { joined, markAt, moved, rowsOf, sinceWhen, sizeOf, spanAt, spansIn, ticks, timeAt, within, x, zoomed } from './timeline'

const span = (start: number, end: number | null, state = 'ready'): Span => ({ start, end, state, detail: '' })
const lane = (worker: string, role: string, spans: Span[] = []): Lane => ({ worker, role, spans, marks: [] })

describe('windows', () => {
  const whole = { from: 100, to: 200 }

  it('place times and find them again', () => {
    expect(x(150, whole, 800)).toBe(400)
    expect(timeAt(400, whole, 800)).toBe(150)
  })

  it('stay within the whole', () => {
    expect(within({ from: 50, to: 90 }, whole)).toEqual({ from: 100, to: 140 })
    expect(within({ from: 190, to: 230 }, whole)).toEqual({ from: 160, to: 200 })
    expect(within({ from: 0, to: 900 }, whole)).toEqual(whole)
    const least = within({ from: 150, to: 150 }, whole)
    expect(least.to).toBeGreaterThan(least.from)
  })

  it('zoom around a point, and move by a share', () => {
    expect(zoomed(whole, 150, 0.5)).toEqual({ from: 125, to: 175 })
    expect(moved(whole, 0.2)).toEqual({ from: 120, to: 220 })
  })

  it.each([0.5, 7, 300, 5000, 200_000])('of %s s have few ticks on whole steps', (length) => {
    const { times, step } = ticks({ from: 1_795_579_055.7, to: 1_795_579_055.7 + length }, 8)
    expect(times.length).toBeLessThanOrEqual(9)
    expect(times.length).toBeGreaterThanOrEqual(2)
    for (const [i, at] of times.entries()) if (i) expect(at - (times[i - 1] as number)).toBeCloseTo(step)
  })
})

describe('lanes', () => {
  it('show the spans that touch the window', () => {
    const spans = Array.from({ length: 1000 }, (_, i) => span(i, i + 1))
    const found = spansIn(spans, { from: 500.5, to: 502.5 })
    expect(found.map((one) => one.start)).toEqual([500, 501, 502])
    expect(spansIn([span(0, 10), span(10, null)], { from: 50, to: 60 })).toEqual([span(10, null)])
  })

  it('say what covers a moment, the later one first', () => {
    const one = lane('w', 'env', [span(0, null, 'ready'), span(5, 8, 'syncing')])
    expect(spanAt(one, 6)?.state).toBe('syncing')
    expect(spanAt(one, 9)?.state).toBe('ready')
    expect(spanAt(one, -1)).toBeNull()
  })

  it('find the mark within reach', () => {
    const one = lane('w', 'env')
    one.marks.push({ at: 50, kind: 'version', text: '', sequence: 1 }, { at: 50.1, kind: 'failure', text: '', sequence: 2 })
    const window = { from: 0, to: 100 }
    expect(markAt(one, 500, window, 1000)?.sequence).toBe(1)
    expect(markAt(one, 501, window, 1000)?.sequence).toBe(2)
    expect(markAt(one, 600, window, 1000)).toBeNull()
  })

  it('stand under their roles, unknown ones last', () => {
    const rows = rowsOf([lane('x', ''), lane('t', 'train'), lane('e', 'env')], ['env', 'train'], { env: 'Environments' })
    expect(rows.map((row) => ('heading' in row ? row.heading : row.lane.worker))).toEqual([
      'Environments',
      'e',
      'train',
      't',
      'Others',
      'x',
    ])
  })
})

describe('a timeline that goes on', () => {
  const mark = (at: number): Mark => ({ at, kind: 'version', text: '', sequence: at })
  const replica = (spans: Span[], marks: Mark[] = []): Lane => ({ ...lane('rollout-0', 'rollout', spans), marks })
  const before: Timeline = {
    start: 0,
    end: 100,
    lanes: [replica([span(1, 90), span(90, 97, 'syncing'), span(97, null)], [mark(90), mark(97)])],
  }

  it('is asked for from the end of the last answer, and a little before', () => {
    expect(sinceWhen(before)).toBe(95)
    expect(sinceWhen({ ...before, start: 98 })).toBe(98)
  })

  it('ends what was open and adds what is new, each once', () => {
    const newer: Timeline = {
      start: 95,
      end: 130,
      lanes: [
        lane('env-0', 'env', [span(120, null)]),
        replica([span(90, 97, 'syncing'), span(97, 110), span(110, null, 'syncing')], [mark(97), mark(112)]),
      ],
    }
    expect(joined(before, newer)).toEqual({
      start: 0,
      end: 130,
      lanes: [
        lane('env-0', 'env', [span(120, null)]),
        replica(
          [span(1, 90), span(90, 97, 'syncing'), span(97, 110), span(110, null, 'syncing')],
          [mark(90), mark(97), mark(112)],
        ),
      ],
    })
    expect(before.lanes[0]?.spans.at(-1)?.end).toBeNull()
  })

  it('is the same when nothing has happened', () => {
    const newer = { start: 95, end: 100, lanes: [replica([span(90, 97, 'syncing'), span(97, null)], [mark(97)])] }
    expect(joined(before, newer)).toEqual(before)
    expect(sizeOf(before)).toBe(5)
  })

  it('does not fit what has forgotten a state or a worker', () => {
    expect(joined(before, { start: 95, end: 130, lanes: [replica([span(120, null)])] })).toBeNull()
    expect(joined(before, { start: 95, end: 130, lanes: [lane('env-0', 'env')] })).toBeNull()
  })
})

describe('ticks in a time zone that puts its clocks back', () => {
  const before = process.env.TZ
  beforeAll(() => {
    process.env.TZ = 'Europe/Berlin'
  })
  afterAll(() => {
    if (before === undefined) delete process.env.TZ
    else process.env.TZ = before
  })
  const at = (day: number, hour = 0) => new Date(2026, 9, day, hour).getTime() / 1000

  it('lie on whole days and hours before it and after', () => {
    // On 25 October 2026 the clocks went back at 3:00.
    expect(ticks({ from: at(23, 12), to: at(28) }, 6)).toEqual({ times: [24, 25, 26, 27, 28].map((day) => at(day)), step: 86_400 })
    const hours = ticks({ from: at(24, 18), to: at(25, 18) }, 5).times
    expect(hours.map((one) => new Date(one * 1000).getHours() % 6)).toEqual(hours.map(() => 0))
    expect(hours.at(-1)).toBe(at(25, 18))
    // And forward on 28 March 2027.
    const spring = ticks({ from: new Date(2027, 2, 26).getTime() / 1000, to: new Date(2027, 2, 30).getTime() / 1000 }, 6).times
    expect(spring.map((one) => new Date(one * 1000).getHours())).toEqual([0, 0, 0, 0, 0])
  })

  it('have the date at midnight', () => {
    expect([tickText(at(24), 21_600), tickText(at(24, 6), 21_600), tickText(at(24), 86_400)]).toEqual(['2026-10-24', '06:00', '2026-10-24'])
  })
})
