import { describe, expect, it } from 'vitest'
import { options, type Colours } from './chart'
import { extent, sections, xs, type Told } from './curves'
import type { Curves } from './records'

const curves: Curves = {
  updates: [1, 2, 3],
  unix_seconds: [1060, 1120, 1180],
  trajectories: [10, 30, 60],
  series: {
    success_rate: [0.1, 0.2, 0.3],
    env_steps: [100, 400, 1000],
    entropy: [1, 0.9, 0.8],
    'trainer.entropy': [1, 0.9, 0.8],
    'trainer.staleness': [0, 0.5, 1],
    odd_number: [null, 5, 6],
    prompt_tokens: [0, 400, 800],
    cached_tokens: [0, 200, 600],
    prefix_cached: [null, 0.5, 0.75],
    nothing: [null, null, null],
  },
  by_task: { a: [0, 0.5, 1] },
  evaluations: [
    { unix_seconds: 1010, update: 0, label: 'before', decoding: 'greedy', temperature: 0, mean: 0.4, low: 0.3, high: 0.5, episodes: 9, not_evaluated: 0 },
    { unix_seconds: 1190, update: 3, label: 'after', decoding: 'greedy', temperature: 0, mean: 0.6, low: 0.5, high: 0.7, episodes: 9, not_evaluated: 0 },
  ],
}
const run = (id: string): Told => ({ id, started: 1000, curves })
const plots = (runs: Told[], along: 'updates' | 'time' | 'trajectories' = 'updates') =>
  new Map(sections(runs, along).flatMap((section) => section.plots.map((plot) => [plot.title, plot] as const)))

describe('curves', () => {
  it('lie along updates, time and trajectories', () => {
    expect(xs(run('r'), 'updates')).toEqual([1, 2, 3])
    expect(xs(run('r'), 'time')).toEqual([60, 120, 180])
    expect(xs(run('r'), 'trajectories')).toEqual([10, 30, 60])
    expect(plots([run('r')], 'time').get('Held-out success')?.lines[0]?.x).toEqual([10, 190])
    expect(plots([run('r')], 'trajectories').get('Held-out success')?.lines[0]?.x).toEqual([0, 60])
  })

  it('of totals are what lies between updates', () => {
    expect(plots([run('r')]).get('Steps per trajectory')?.lines[0]?.y).toEqual([10, 15, 20])
    expect(plots([run('r')]).get('Trajectories per minute')?.lines[0]?.y).toEqual([null, 20, 30])
  })

  it('leave out the night in which no process of the run worked', () => {
    // It was down for nearly a day between its first update and its second.
    const down: Told = {
      id: 'r',
      started: 1000,
      curves: {
        ...curves,
        unix_seconds: [1060, 86_120, 86_180],
        series: { ...curves.series, train_seconds: [50, 110, 170] },
      },
    }
    expect(xs(down, 'time')).toEqual([50, 110, 170])
    expect(xs(down, 'updates')).toEqual([1, 2, 3])
    expect(plots([down]).get('Trajectories per minute')?.lines[0]?.y).toEqual([12, 20, 30])
    // The evaluation before training is where that begins, and the one after it where it ends.
    expect(plots([down], 'time').get('Held-out success')?.lines[0]?.x).toEqual([0, 170])
    expect(extent([down], 'time')).toEqual([0, 170])
  })

  it('do not mix two clocks in a run that an older dart began', () => {
    const begun = { ...curves, series: { ...curves.series, train_seconds: [null, 110, 170] } }
    expect(xs({ id: 'r', started: 1000, curves: begun }, 'time')).toEqual([60, 120, 180])
  })

  it('show no success of a run that samples nothing', () => {
    const of = (rates: (number | null)[]) => {
      const imitation = { ...curves, trajectories: [0, 0, 0], series: { ...curves.series, success_rate: rates } }
      return plots([{ id: 'r', started: 1000, curves: imitation }]).has('Training success')
    }
    expect(of([null, null, null])).toBe(false)
    expect(of([0, 0, 0])).toBe(false)
    expect(plots([run('r')]).has('Training success')).toBe(true)
  })

  it('show every number once, and none without values', () => {
    const titles = sections([run('r')], 'updates').flatMap((section) => section.plots.map((plot) => plot.title))
    expect(new Set(titles).size).toBe(titles.length)
    expect(titles).toContain('odd_number')
    expect(titles).not.toContain('nothing')
    expect(titles).not.toContain('trainer.entropy')
    expect(titles.filter((title) => /cached|prompt/.test(title))).toEqual(['prefix_cached'])
    expect(titles).not.toContain('KL')
  })

  it('of several runs have a colour and a name for each', () => {
    const lines = plots([run('r'), run('s')]).get('Training success')?.lines ?? []
    expect(lines.map((line) => [line.name, line.colour])).toEqual([
      ['r', 0],
      ['s', 1],
    ])
    const names = plots([run('r'), run('s')]).get('Held-out success: greedy')?.lines.map((line) => line.name)
    expect(names).toEqual(['r', 's'])
  })

  it('all cover the same stretch', () => {
    expect(extent([run('r')], 'updates')).toEqual([0, 3])
    expect(extent([run('r')], 'time')).toEqual([0, 190])
    expect(extent([], 'time')).toBeNull()
  })

  it('say when there are more tasks than are shown', () => {
    const of = (tasks: number) => {
      const by_task = Object.fromEntries(Array.from({ length: tasks }, (_, i) => [`t${i}`, [0, 0, 1]]))
      return sections([{ id: 'r', started: 0, curves: { ...curves, by_task } }], 'updates').find((one) => one.key === 'tasks')?.note
    }
    expect(of(63)).toBe('')
    expect(of(64)).toMatch(/^Only the first 64 tasks/)
  })

  it('of fates are shares of what was decided', () => {
    const series = { 'fates.trained': [2, 5, 5], 'fates.dropped: stale': [null, 3, 5] }
    const told = { id: 'r', started: 0, curves: { ...curves, series } }
    const [trained, stale] = plots([told]).get('Fates')?.lines ?? []
    expect(trained?.y).toEqual([1, 0.5, 0])
    expect(stale?.y).toEqual([0, 0.5, 1])
  })

  it('of fates show every cause there is, the largest first after trained', () => {
    const series = { 'fates.dropped: stale': [1, 1, 2], 'fates.dropped: equal rewards': [0, 3, 9], 'fates.trained': [1, 1, 1] }
    const told = { id: 'r', started: 0, curves: { ...curves, series } }
    expect(plots([told]).get('Fates')?.lines.map((line) => line.name)).toEqual(['trained', 'equal rewards', 'stale'])
  })
})

describe('charts', () => {
  const colours: Colours = { series: ['red', 'blue'], text: 'black', faint: 'grey', grid: 'silver' }
  const look = { axis: 'number', unit: 'percent', range: null, whole: null, most: null, low: false, fromZero: true, narrow: false } as const

  it('keep the raw line faintly when they are smoothed', () => {
    const lines = [{ name: 'a', x: [1, 2], y: [0, 1], colour: 0 }]
    const names = (smoothing: number) =>
      (options(lines, { ...look, smoothing }, colours).series as { name: string }[]).map((one) => one.name)
    expect(names(0)).toEqual(['a'])
    expect(names(0.5)).toEqual(['raw:a', 'a'])
  })

  it('show a single value as a point, whatever is missing around it', () => {
    const shown = (y: (number | null)[]) =>
      (options([{ name: 'a', x: [1, 2, 3], y, colour: 0 }], { ...look, smoothing: 0 }, colours).series as { showSymbol: boolean }[])[0]?.showSymbol
    expect(shown([null, 0.5, null])).toBe(true)
    expect(shown([null, 0.5, 0.6])).toBe(false)
  })

  it('draw intervals, and never smooth what was measured rarely', () => {
    const lines = [{ name: 'a', x: [1, 2], y: [0, 1], low: [0, 0], high: [1, 1], points: true, colour: 0 }]
    const names = (options(lines, { ...look, smoothing: 0.5 }, colours).series as { name: string }[]).map((one) => one.name)
    expect(names).toEqual(['a', 'band:a'])
  })
})
