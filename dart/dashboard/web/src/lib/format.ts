/** Numbers, shares, durations and times as people read them. */

export const NONE = '–'

const whole = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 })
const few = new Intl.NumberFormat('en-US', { maximumSignificantDigits: 4 })

/** 12,345 · 0.3086 · 3.2e-5; null is a dash. */
export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE
  const size = Math.abs(value)
  if (Number.isInteger(value) || size >= 10_000) return whole.format(value)
  if (size < 0.001) return value.toExponential(1).replace('e-', 'e−')
  return few.format(value)
}

/** 980 · 12.3k · 4.17M, for axes and narrow places. */
export function compact(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE
  const size = Math.abs(value)
  for (const [limit, unit] of [
    [1e12, 'T'],
    [1e9, 'G'],
    [1e6, 'M'],
    [1e4, 'k'],
  ] as const)
    if (size >= limit) return `${Number((value / (unit === 'k' ? 1e3 : limit)).toPrecision(3))}${unit}`
  return number(Number(value.toPrecision(4)))
}

/** A share from 0 to 1: 31 % · 0.4 % · 100 %. */
export function percent(share: number | null | undefined, digits?: number): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE
  const value = share * 100
  const shown = value.toFixed(digits ?? (value > 0 && value < 1 ? 1 : 0))
  // Nearly all is not all: 99.5 % · 99.9 %.
  if (digits === undefined && shown === '100' && share < 1) return `${(Math.floor(value * 10) / 10).toFixed(1)} %`
  return `${shown} %`
}

/** The difference of two shares, in percentage points: +5.0 · −1.2. */
export function points(difference: number): string {
  const size = (Math.abs(difference) * 100).toFixed(1)
  return `${difference < 0 && size !== '0.0' ? '−' : '+'}${size}`
}

/** 0.4 s · 45 s · 3 min 12 s · 2 h 5 min · 3 d 4 h. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`
  const s = Math.round(seconds)
  if (s < 60) return `${s} s`
  const two = (big: number, bigUnit: string, small: number, smallUnit: string) =>
    small ? `${big} ${bigUnit} ${small} ${smallUnit}` : `${big} ${bigUnit}`
  if (s < 3600) return two(Math.floor(s / 60), 'min', s % 60, 's')
  if (s < 86_400) return two(Math.floor(s / 3600), 'h', Math.floor((s % 3600) / 60), 'min')
  return two(Math.floor(s / 86_400), 'd', Math.floor((s % 86_400) / 3600), 'h')
}

const CLOSE_SECONDS = 7 * 86_400

/** "5 min ago", "in 3 h"; for other weeks the date. */
export function relative(unixSeconds: number, now: number): string {
  const ago = now - unixSeconds
  if (Math.abs(ago) > CLOSE_SECONDS) return day(unixSeconds)
  if (Math.abs(ago) < 5) return 'now'
  const size = Math.abs(ago)
  const text =
    size < 60
      ? `${Math.floor(size)} s`
      : size < 3600
        ? `${Math.floor(size / 60)} min`
        : size < 86_400
          ? `${Math.floor(size / 3600)} h`
          : `${Math.floor(size / 86_400)} d`
  return ago > 0 ? `${text} ago` : `in ${text}`
}

const pad = (n: number, length = 2) => String(n).padStart(length, '0')

/** 2026-11-25, in the reader's time zone. */
export function day(unixSeconds: number): string {
  const d = new Date(unixSeconds * 1000)
  return `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())}`
}

/** 13:05:09, in the reader's time zone; with `milliseconds` 13:05:09.120. */
export function clock(unixSeconds: number, milliseconds = false): string {
  const d = new Date(unixSeconds * 1000)
  const text = `${pad(d.getHours())}:${pad(d.getMinutes())}:${pad(d.getSeconds())}`
  return milliseconds ? `${text}.${pad(d.getMilliseconds(), 3)}` : text
}

/** 2026-11-25 13:05:09, in the reader's time zone. */
export const absolute = (unixSeconds: number): string => `${day(unixSeconds)} ${clock(unixSeconds)}`

/** 2026-11-25 13:05:09 to 14:00:00; the end has its date if that is another. */
export const stretch = (from: number, to: number): string =>
  `${absolute(from)} to ${day(from) === day(to) ? clock(to) : absolute(to)}`

/** "1 update", "2 updates", "12,345 steps". */
export const count = (n: number, one: string, many = `${one}s`): string => `${number(n)} ${n === 1 ? one : many}`
