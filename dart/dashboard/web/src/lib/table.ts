/** What the table needs to know about its rows, without drawing them. */

export interface Order {
  by: string
  down: boolean
}

/** "name" or "-name", as an address holds it. */
export const orderFrom = (text: string): Order => ({ by: text.replace(/^-/, ''), down: text.startsWith('-') })
export const orderText = (order: Order): string => (order.by ? (order.down ? '-' : '') + order.by : '')

type Value = number | string | boolean | null

/** A sorted copy. Rows without a value come last, whatever the direction; equal rows keep their order. */
export function sorted<Row>(rows: readonly Row[], value: (row: Row) => Value, down: boolean): Row[] {
  const sign = down ? -1 : 1
  return rows
    .map((row) => [value(row), row] as const)
    .sort(([a], [b]) => {
      if (a === null || b === null) return Number(a === null) - Number(b === null)
      return typeof a === 'string' || typeof b === 'string'
        ? sign * String(a).localeCompare(String(b), undefined, { numeric: true })
        : sign * (Number(a) - Number(b))
    })
    .map(([, row]) => row)
}

const BEYOND = 12
const FEW = 120

/** Whether the reader is so far down that more rows are wanted. */
export const nearEnd = (count: number, height: number, top: number, screen: number): boolean =>
  top + screen >= (count - BEYOND) * height

/** The rows to draw: those in sight and a few beyond. `top`: how far the first row is above the screen, in pixels. */
export function visible(count: number, height: number, top: number, screen: number): { start: number; end: number } {
  if (count <= FEW) return { start: 0, end: count }
  const first = Math.floor(top / height) - BEYOND
  const start = Math.max(0, Math.min(first, count - 1))
  return { start, end: Math.max(start, Math.min(count, Math.ceil((top + screen) / height) + BEYOND)) }
}
