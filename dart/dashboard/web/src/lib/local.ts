/** Unix seconds and the text of an `<input type="datetime-local">`. */
import { clock, day } from './format'

export const toLocal = (seconds: string | undefined): string =>
  Number(seconds) > 0 ? `${day(Number(seconds))}T${clock(Number(seconds))}` : ''

export function fromLocal(text: string): string {
  const milliseconds = new Date(text).getTime()
  return Number.isFinite(milliseconds) ? String(milliseconds / 1000) : ''
}
