/** Draws the timeline's lanes on a canvas. */
import { clock, day } from './format'
import { stateToken } from './states'
import { spansIn, ticks, x, type Row, type Window } from './timeline'

export const ROW = 22
export const AXIS = 22

export interface Scene {
  rows: readonly Row[]
  window: Window
  /** Where spans without an end stop. */
  now: number
  width: number
  height: number
  /** How far the lanes are scrolled, in pixels. */
  top: number
  /** The lane under the pointer, or -1. */
  pointed: number
}

/** Marks by their kind: a sign, and the token of its colour. */
export const MARKS: Record<string, { sign: 'bar' | 'cross' | 'square' | 'triangle'; token: string; word: string }> = {
  version: { sign: 'bar', token: '--text', word: 'new weights' },
  failure: { sign: 'cross', token: '--bad', word: 'failure' },
  violation: { sign: 'cross', token: '--bad', word: 'broken rule' },
  quarantine: { sign: 'square', token: '--warn', word: 'quarantine' },
  missing: { sign: 'square', token: '--warn', word: 'environments missing' },
  'left out': { sign: 'cross', token: '--bad', word: 'left out' },
  stall: { sign: 'triangle', token: '--bad', word: 'stall' },
  remark: { sign: 'triangle', token: '--warn', word: 'remark' },
  checkpoint: { sign: 'triangle', token: '--accent', word: 'checkpoint' },
}
const UNKNOWN = { sign: 'triangle', token: '--warn', word: '' } as const
export const markLook = (kind: string) => MARKS[kind] ?? { ...UNKNOWN, word: kind }

export type Read = (token: string) => string

export function reader(of: Element): Read {
  const style = getComputedStyle(of)
  const known = new Map<string, string>()
  return (token) => {
    const value = known.get(token) ?? style.getPropertyValue(token).trim()
    known.set(token, value)
    return value
  }
}

/** The text of a tick: the date at midnight, fractions where steps are short. */
export function tickText(at: number, step: number): string {
  if (step >= 86_400 || (step >= 60 && clock(at) === '00:00:00')) return day(at)
  if (step < 1) return clock(at, true).slice(0, step < 0.1 ? undefined : -2)
  return step >= 60 ? clock(at).slice(0, 5) : clock(at)
}

export function paint(ctx: CanvasRenderingContext2D, scene: Scene, read: Read): void {
  const { rows, window, width, height, top } = scene
  ctx.clearRect(0, 0, width, height)
  const { times, step } = ticks(window, Math.max(2, Math.floor(width / 90)))
  ctx.fillStyle = read('--grid')
  for (const at of times) ctx.fillRect(Math.round(x(at, window, width)), AXIS, 1, height)
  const first = Math.max(0, Math.floor(top / ROW))
  const last = Math.min(rows.length, Math.ceil((top + height) / ROW))
  ctx.save()
  ctx.beginPath()
  ctx.rect(0, AXIS, width, height - AXIS)
  ctx.clip()
  for (let i = first; i < last; i++) row(ctx, rows[i] as Row, AXIS + i * ROW - top, scene, i === scene.pointed, read)
  ctx.restore()
  ctx.fillStyle = read('--text-3')
  ctx.font = `11px ${read('--font')}`
  ctx.textBaseline = 'middle'
  for (const at of times) {
    const text = tickText(at, step)
    const px = x(at, window, width)
    if (px + 4 + ctx.measureText(text).width < width) ctx.fillText(text, px + 4, AXIS / 2)
  }
}

function row(ctx: CanvasRenderingContext2D, row: Row, y: number, scene: Scene, pointed: boolean, read: Read): void {
  const { window, width, now } = scene
  if ('heading' in row) {
    ctx.fillStyle = read('--raised')
    ctx.fillRect(0, y, width, ROW)
    return
  }
  if (pointed) {
    ctx.fillStyle = read('--raised')
    ctx.fillRect(0, y, width, ROW)
  }
  let drawnTo = -1
  for (const span of spansIn(row.lane.spans, window)) {
    const from = Math.max(0, x(span.start, window, width))
    const to = Math.min(width, x(span.end ?? now, window, width))
    if (to < drawnTo + 0.4 && to - from < 0.4) continue // many within one pixel
    ctx.fillStyle = read(stateToken(span.state))
    ctx.fillRect(from, y + 5, Math.max(0.7, to - from), ROW - 10)
    drawnTo = to
  }
  const at = new Set<number>()
  for (const mark of row.lane.marks) {
    const px = Math.round(x(mark.at, window, width))
    const look = markLook(mark.kind)
    if (px < -4 || px > width + 4 || (look.sign === 'bar' && at.has(px))) continue
    at.add(px)
    ctx.fillStyle = ctx.strokeStyle = read(look.token)
    sign(ctx, look.sign, px, y + ROW / 2)
  }
}

function sign(ctx: CanvasRenderingContext2D, kind: 'bar' | 'cross' | 'square' | 'triangle', px: number, y: number): void {
  if (kind === 'bar') {
    ctx.fillRect(px, y - 8, 1, 16)
    return
  }
  if (kind === 'square') {
    ctx.fillRect(px - 3, y - 3, 7, 7)
    return
  }
  ctx.beginPath()
  if (kind === 'cross') {
    ctx.lineWidth = 2
    ctx.moveTo(px - 4, y - 4)
    ctx.lineTo(px + 4, y + 4)
    ctx.moveTo(px + 4, y - 4)
    ctx.lineTo(px - 4, y + 4)
    ctx.stroke()
    return
  }
  ctx.moveTo(px, y - 5)
  ctx.lineTo(px + 5, y + 4)
  ctx.lineTo(px - 5, y + 4)
  ctx.fill()
}
