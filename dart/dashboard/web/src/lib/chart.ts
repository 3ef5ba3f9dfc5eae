/** What a chart shows, and how that becomes ECharts' options. Nothing here touches the page, except to read colours. */
import type { CustomSeriesRenderItem, EChartsOption, SeriesOption } from 'echarts'
import { absolute, compact, duration, number, percent } from './format'
import { ema } from './smoothing'

export interface Line {
  /** Unique within the chart; shown in its legend and tooltip. Foreign text is fine: it is only ever shown as text. */
  name: string
  x: readonly number[]
  y: readonly (number | null)[]
  /** Place in the palette of series, from 0; lines of one run share it. */
  colour: number
  /** The 95 % interval of each point. */
  low?: readonly number[]
  high?: readonly number[]
  dashed?: boolean
  /** Draws each point, and is never smoothed: for values that were measured rarely. */
  points?: boolean
  /** Step-like: holds its value until the next point. */
  stepped?: boolean
}

/** "elapsed": seconds since a run began. "time": Unix milliseconds. */
export type Axis = 'number' | 'elapsed' | 'time'
export type Unit = 'number' | 'percent'

export interface Look {
  axis: Axis
  unit: Unit
  /** From 0 to below 1; the raw line stays faintly visible. */
  smoothing: number
  range: readonly [number, number] | null
  /** The stretch without a range; null: that of the lines. */
  whole: readonly [number, number] | null
  /** The y axis begins at 0. */
  fromZero: boolean
  /** Where the y axis ends; null: where the lines do. */
  most: number | null
  /** For few labels. */
  low: boolean
  /** For screens without much room. */
  narrow: boolean
}

export interface Colours {
  series: readonly string[]
  text: string
  faint: string
  grid: string
}

export const PALETTE = 8
const FAINT = 0.28

export function colours(of: Element): Colours {
  const style = getComputedStyle(of)
  const read = (name: string) => style.getPropertyValue(name).trim()
  return {
    series: Array.from({ length: PALETTE }, (_, i) => read(`--series-${i + 1}`)),
    text: read('--text-2'),
    faint: read('--text-3'),
    grid: read('--grid'),
  }
}

export const written = (value: number | null, unit: Unit): string =>
  unit === 'percent' ? percent(value, 1) : number(value)

/** A moment or a number on the x axis, as the tooltip and the legend say it. */
export function place(x: number, axis: Axis): string {
  if (axis === 'time') return absolute(x / 1000)
  return axis === 'elapsed' ? `after ${duration(x)}` : number(x)
}

/** Distances between labels of elapsed time, in seconds. */
const STEPS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800]

/** The shortest distance that makes at most `most` labels. */
export const elapsedStep = (span: number, most: number): number => STEPS.find((step) => span / step <= most) ?? span

function extent(lines: readonly Line[], look: Look): number {
  const range = look.range ?? look.whole
  if (range) return range[1] - range[0]
  return Math.max(0, ...lines.map((line) => (line.x.at(-1) ?? 0) - (line.x[0] ?? 0)))
}

export function options(lines: readonly Line[], look: Look, c: Colours): EChartsOption {
  const label = { color: c.faint, fontSize: 11, hideOverlap: true }
  const last = { showMaxLabel: false }
  const most = look.most ?? (look.unit === 'percent' ? share(lines) : null)
  return {
    animation: false,
    grid: { left: 6, right: 14, top: 10, bottom: 4, outerBoundsMode: 'same', outerBoundsContain: 'axisLabel' },
    xAxis: {
      type: look.axis === 'time' ? 'time' : 'value',
      min: (look.range ?? look.whole)?.[0] ?? 'dataMin',
      max: (look.range ?? look.whole)?.[1] ?? 'dataMax',
      splitNumber: look.narrow ? 3 : 5,
      minInterval: look.axis === 'number' ? 1 : undefined, // updates and trajectories are whole
      interval: look.axis === 'elapsed' ? elapsedStep(extent(lines, look), look.narrow ? 3 : 5) : undefined,
      axisLine: { lineStyle: { color: c.grid } },
      axisTick: { show: false },
      splitLine: { show: false },
      axisLabel: look.axis === 'time' ? label : { ...label, ...last, formatter: (value: number) => tick(value, look.axis) },
    },
    yAxis: {
      type: 'value',
      scale: !look.fromZero,
      max: most ?? undefined,
      interval: most === 1 && look.fromZero ? (look.low ? 0.5 : 0.25) : undefined,
      splitNumber: look.low ? 2 : 4,
      axisLine: { show: false },
      axisTick: { show: false },
      splitLine: { lineStyle: { color: c.grid } },
      axisLabel: {
        ...label,
        formatter: (value: number) => (look.unit === 'percent' ? `${compact(value * 100)} %` : compact(value)),
      },
    },
    series: lines.flatMap((line) => drawn(line, look, c)),
  }
}

const tick = (value: number, axis: Axis) => (axis === 'elapsed' ? duration(value) : compact(value))

/** Axes of shares end at 100 % rather than above, and one of zeros is not 100 % high. */
function share(lines: readonly Line[]): number | null {
  const max = lines.flatMap((line) => [line.y, line.high ?? []]).reduce((most, values) => Math.max(most, ...values.map(Number)), 0)
  if (max <= 0) return 0.1
  return max > 0.8 && max <= 1 ? 1 : null
}

function drawn(line: Line, look: Look, c: Colours): SeriesOption[] {
  const color = c.series[line.colour % PALETTE] ?? c.text
  const smooth = look.smoothing > 0 && !line.points
  const pairs = (values: readonly (number | null)[]) => line.x.map((x, i) => [x, values[i] ?? null])
  const raw: SeriesOption = {
    type: 'line',
    name: smooth ? `raw:${line.name}` : line.name,
    data: pairs(line.y),
    // A single value has no neighbour that a line could be drawn to.
    showSymbol: line.points || line.y.filter((value) => value !== null).length === 1,
    symbol: 'circle',
    symbolSize: line.points ? 6 : 4,
    sampling: line.points ? undefined : 'lttb',
    step: line.stepped ? 'end' : undefined,
    connectNulls: true,
    silent: true,
    itemStyle: { color },
    lineStyle: { color, width: smooth ? 1 : 1.6, opacity: smooth ? FAINT : 1, type: line.dashed ? [4, 3] : 'solid' },
    emphasis: { disabled: true },
    z: smooth ? 2 : 3,
  }
  const all: SeriesOption[] = [raw]
  if (smooth) {
    const lineStyle = { color, width: 1.8, opacity: 1, type: line.dashed ? [4, 3] : 'solid' } as const
    all.push({ ...raw, name: line.name, data: pairs(ema(line.y, look.smoothing)), lineStyle, z: 3 } as SeriesOption)
  }
  if (line.low && line.high) all.push(band(line, color))
  return all
}

/** The interval of each point as a bar, and the area between neighbours. */
function band(line: Line, color: string): SeriesOption {
  const draw: CustomSeriesRenderItem = (params, api) => {
    const i = params.dataIndex
    const at = (x: unknown, y: unknown) => api.coord([x as number, y as number])
    const [x, low] = at(api.value(0), api.value(1)) as [number, number]
    const high = at(api.value(0), api.value(2))[1] as number
    const shape = (d: number) => ({ x1: x - d, x2: x + d })
    const style = { stroke: color, lineWidth: 1.2, opacity: 0.7 }
    const next = line.x[i + 1]
    const area =
      next === undefined
        ? []
        : [[x, low], at(next, line.low?.[i + 1]), at(next, line.high?.[i + 1]), [x, high]].map((p) => p as number[])
    return {
      type: 'group',
      children: [
        ...(area.length ? [{ type: 'polygon' as const, shape: { points: area }, style: { fill: color, opacity: 0.13 } }] : []),
        { type: 'line', shape: { x1: x, y1: low, x2: x, y2: high }, style },
        { type: 'line', shape: { ...shape(3), y1: low, y2: low }, style },
        { type: 'line', shape: { ...shape(3), y1: high, y2: high }, style },
      ],
    }
  }
  return {
    type: 'custom',
    name: `band:${line.name}`,
    renderItem: draw,
    clip: true,
    data: line.x.map((x, i) => [x, line.low?.[i] ?? NaN, line.high?.[i] ?? NaN]),
    encode: { x: 0, y: [1, 2] },
    silent: true,
    z: 1,
  }
}

/** The index of the point of `line` that is nearest to `x`; -1 if it has none. */
export function nearest(line: Pick<Line, 'x'>, x: number): number {
  let best = -1
  let distance = Infinity
  for (let i = 0; i < line.x.length; i++) {
    const d = Math.abs((line.x[i] as number) - x)
    if (d < distance) [best, distance] = [i, d]
  }
  return best
}

/** The last value that is there. */
export function lastOf(line: Pick<Line, 'y'>): number | null {
  return line.y.findLast((value) => value !== null) ?? null
}
