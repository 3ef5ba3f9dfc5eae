/** What is drawn on a screenshot for an action. Points are fractions of the picture, as the server sends them. */

export interface Point {
  x: number
  y: number
}

export type Mark =
  | { kind: 'point'; at: Point; rings: number; label: string }
  | { kind: 'path'; points: Point[]; label: string }
  | { kind: 'arrow'; at: Point; dx: number; dy: number; label: string }
  /** Something without a place: typed text, keys, a wait, the end. */
  | { kind: 'chip'; text: string }

export type ActionJson = Record<string, unknown>

const MIDDLE: Point = { x: 0.5, y: 0.5 }

function point(value: unknown): Point | null {
  if (typeof value !== 'object' || value === null) return null
  const { x, y } = value as Record<string, unknown>
  return typeof x === 'number' && typeof y === 'number' ? { x, y } : null
}

const text = (value: unknown): string => (typeof value === 'string' ? value : '')
const whole = (value: unknown): number => (typeof value === 'number' ? value : 0)
const list = (value: unknown): unknown[] => (Array.isArray(value) ? value : [])

/** The marks of an action; those of several actions in their order. */
export function marks(action: ActionJson | null): Mark[] {
  if (!action) return []
  if (action['kind'] === 'several') return list(action['actions']).flatMap((one) => marks(one as ActionJson))
  const at = point(action['at'])
  switch (action['kind']) {
    case 'click': {
      const button = text(action['button'])
      const words = [...list(action['modifiers']).map(text), button === 'left' ? '' : button].filter(Boolean)
      const held = whole(action['hold_seconds'])
      if (held) words.push(`${held} s`)
      return at ? [{ kind: 'point', at, rings: Math.max(1, whole(action['count'])), label: words.join(' ') }] : []
    }
    case 'move':
      return at ? [{ kind: 'point', at, rings: 0, label: 'move' }] : []
    case 'button':
      return at ? [{ kind: 'point', at, rings: 1, label: text(action['mode']) }] : []
    case 'drag': {
      const points = list(action['path']).flatMap((one) => point(one) ?? [])
      return points.length > 1 ? [{ kind: 'path', points, label: '' }] : []
    }
    case 'scroll': {
      const [dx, dy] = [whole(action['dx']), whole(action['dy'])]
      const amount = [dy ? `${Math.abs(dy)} ${dy > 0 ? 'down' : 'up'}` : '', dx ? `${Math.abs(dx)} ${dx > 0 ? 'right' : 'left'}` : '']
      return [{ kind: 'arrow', at: at ?? MIDDLE, dx: Math.sign(dx), dy: Math.sign(dy), label: amount.filter(Boolean).join(', ') }]
    }
    case 'type_text':
      return [{ kind: 'chip', text: `“${text(action['text'])}”` }]
    case 'keys':
      return [{ kind: 'chip', text: list(action['keysyms']).map(text).join(' + ') }]
    case 'wait':
      return [{ kind: 'chip', text: `wait ${whole(action['seconds'])} s` }]
    case 'finish':
      return [{ kind: 'chip', text: `finish: ${text(action['status'])}${action['answer'] ? ` “${text(action['answer'])}”` : ''}` }]
    case 'system':
      return [{ kind: 'chip', text: `${text(action['system'])} ${text(action['argument'])}`.trim() }]
    case 'code':
      return [{ kind: 'chip', text: `run ${text(action['language'])}` }]
    default:
      return []
  }
}

/** The largest scale at which a picture fits: a whole number for small ones, so that every pixel stays a square. */
export function fit(width: number, height: number, roomWidth: number, roomHeight: number): number {
  const scale = Math.min(roomWidth / width, roomHeight / height)
  return scale >= 2 ? Math.floor(scale) : Math.max(scale, 0.05)
}
