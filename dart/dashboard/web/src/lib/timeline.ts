/** The timeline's arithmetic: windows of time, ticks, and what lies under the pointer. Nothing here draws. */
import { groupBy } from './group'
import type { Lane, Mark, Span, Timeline } from './records'

/** A stretch of time, in Unix seconds. */
export interface Window {
  from: number
  to: number
}

const LEAST_SECONDS = 0.05

export const x = (at: number, window: Window, width: number): number => ((at - window.from) / (window.to - window.from)) * width
export const timeAt = (px: number, window: Window, width: number): number =>
  window.from + (px / width) * (window.to - window.from)

/** Within `whole`, and not shorter than can be shown. */
export function within(window: Window, whole: Window): Window {
  const length = Math.min(Math.max(window.to - window.from, LEAST_SECONDS), whole.to - whole.from)
  const from = Math.min(Math.max(window.from, whole.from), whole.to - length)
  return { from, to: from + length }
}

/** Longer or shorter by a factor, with `at` staying in its place. */
export function zoomed(window: Window, at: number, factor: number): Window {
  return { from: at - (at - window.from) * factor, to: at + (window.to - at) * factor }
}

/** Moved by a share of its length. */
export function moved(window: Window, share: number): Window {
  const by = (window.to - window.from) * share
  return { from: window.from + by, to: window.to + by }
}

const STEPS = [
  0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200,
  86_400, 172_800, 604_800,
]

const HOUR = 3600

/** Times to label: at most `most`, on whole steps of local time. */
export function ticks(window: Window, most: number): { times: number[]; step: number } {
  const step = STEPS.find((one) => (window.to - window.from) / one <= most) ?? 604_800
  const offset = (at: number) => new Date(at * 1000).getTimezoneOffset() * 60
  const known = offset(window.from)
  const times: number[] = []
  // Clocks that are put forward or back within the window move longer steps, but not those that divide the hour.
  const moves = step > HOUR
  for (let i = Math.floor((window.from - known) / step) - 1; i * step + known <= window.to + (moves ? 2 * HOUR : 0); i++) {
    const at = Number((i * step + (moves ? offset(i * step + known) : known)).toFixed(3))
    if (at >= window.from && at <= window.to && at > (times.at(-1) ?? -Infinity)) times.push(at)
  }
  return { times, step }
}

/** The spans that touch the window, by binary search; spans are in order of their starts. */
export function spansIn(spans: readonly Span[], window: Window): readonly Span[] {
  let low = 0
  let high = spans.length
  while (low < high) {
    const middle = (low + high) >> 1
    const end = spans[middle]?.end
    if (end !== null && end !== undefined && end < window.from) low = middle + 1
    else high = middle
  }
  let stop = low
  while (stop < spans.length && (spans[stop] as Span).start <= window.to) stop++
  return spans.slice(low, stop)
}

/** The mark nearest to `px`, if it is within reach. */
export function markAt(lane: Lane, px: number, window: Window, width: number, reach = 6): Mark | null {
  let best: Mark | null = null
  let distance = reach
  for (const mark of lane.marks) {
    const d = Math.abs(x(mark.at, window, width) - px)
    // Failures are looked for more often than versions.
    if (d < distance || (d === distance && mark.kind !== 'version')) [best, distance] = [mark, d]
  }
  return best
}

/** The last span that covers the moment: later ones are drawn over earlier ones. */
export function spanAt(lane: Lane, at: number): Span | null {
  return lane.spans.findLast((span) => span.start <= at && (span.end === null || span.end >= at)) ?? null
}

/** The clock of the run's machine may have been put back a little since its last event. */
const OVERLAP_SECONDS = 5

/** From when on the server is asked for what has been since. */
export const sinceWhen = (before: Timeline): number => Math.max(before.start, before.end - OVERLAP_SECONDS)

/** A timeline with what has been since `newer.start`. Null if they do not fit together, because a state that lasted is
    gone: a process of the run was killed, and its states ended earlier; or the run was begun anew. */
export function joined(before: Timeline, newer: Timeline): Timeline | null {
  const known = new Map(before.lanes.map((lane) => [lane.worker, lane]))
  const lanes: Lane[] = []
  for (const lane of newer.lanes) {
    const old = known.get(lane.worker)
    known.delete(lane.worker)
    const told = (span: Span) => lane.spans.some((one) => one.start === span.start && one.state === span.state)
    if (old?.spans.some((span) => span.end === null && !told(span))) return null
    // Whatever touches the time since then is told again as it is now.
    const spans = old?.spans.filter((span) => span.end !== null && span.end < newer.start) ?? []
    const marks = old?.marks.filter((mark) => mark.at < newer.start) ?? []
    lanes.push({ ...lane, spans: [...spans, ...lane.spans], marks: [...marks, ...lane.marks] })
  }
  return known.size ? null : { start: before.start, end: newer.end, lanes } // each answer has every lane
}

/** How many spans and marks there are, which are copied and drawn whenever there are more. */
export const sizeOf = (timeline: Timeline): number =>
  timeline.lanes.reduce((sum, lane) => sum + lane.spans.length + lane.marks.length, 0)

/** A row of the drawing: a lane, or the heading of a role. */
export type Row = { heading: string; role: string } | { lane: Lane }

export function rowsOf(lanes: readonly Lane[], order: readonly string[], words: Record<string, string>): Row[] {
  const groups = groupBy(lanes, (lane) => lane.role)
  const roles = [...groups.keys()].sort((a, b) => (order.indexOf(a) + 99) % 99 - ((order.indexOf(b) + 99) % 99))
  return roles.flatMap((role) => [
    { heading: words[role] ?? (role || 'Others'), role },
    ...(groups.get(role) ?? []).map((lane) => ({ lane })),
  ])
}
