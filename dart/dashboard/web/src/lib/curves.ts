/** The curves of the run page: which there are, in sections, and the lines of each. */
import { PALETTE, type Line, type Unit } from './chart'
import { groupBy } from './group'
import type { Curves, EvaluationPoint } from './records'
import { increments, ratio } from './smoothing'

export type Along = 'updates' | 'time' | 'trajectories'
export const ALONG: readonly Along[] = ['updates', 'time', 'trajectories']

/** A run whose curves are shown. */
export interface Told {
  id: string
  started: number
  curves: Curves
}

export interface Plot {
  key: string
  title: string
  hint: string
  unit: Unit
  fromZero: boolean
  /** Where the y axis ends, if not where the lines do. */
  most?: number
  lines: Line[]
}

export interface Section {
  key: string
  title: string
  plots: Plot[]
  /** Many small charts of the same thing. */
  small?: boolean
  /** What the reader must know of all of them. */
  note?: string
}

type Values = readonly (number | null)[]
/** Name within the chart, and its values; null if the run has none. */
type Source = readonly [name: string, values: (curves: Curves) => Values | null]

interface Recipe {
  title: string
  hint?: string
  unit?: Unit
  fromZero?: boolean
  /** A function where the runs' own series say which there are. */
  sources: readonly Source[] | ((runs: readonly Told[]) => readonly Source[])
}

const of = (key: string) => (curves: Curves) => curves.series[key] ?? curves.series[`trainer.${key}`] ?? null
const added = (key: string) => (curves: Curves) => (curves.series[key] ? increments(curves.series[key]) : null)
const single = (title: string, key: string, hint = '', unit: Unit = 'number', fromZero = false): Recipe => ({
  title,
  hint,
  unit,
  fromZero,
  sources: [[title, of(key)]],
})

function per(above: string, below: (curves: Curves) => Values): (curves: Curves) => Values | null {
  return (curves) => {
    const top = added(above)(curves)
    return top && ratio(top, below(curves))
  }
}

/** Of the trajectories whose fate was decided between two updates, the share that had this one. */
function fate(name: string): (curves: Curves) => Values | null {
  return (curves) => {
    const all = Object.keys(curves.series).filter((key) => key.startsWith('fates.'))
    const decided = curves.updates.map((_, i) => all.reduce((sum, key) => sum + (curves.series[key]?.[i] ?? 0), 0))
    const own = curves.series[`fates.${name}`]
    return own ? ratio(increments(own.map((value) => value ?? 0)), increments(decided)) : null
  }
}

/** Trained first, then the causes of dropping by their number, as many as there are colours. */
function fateSources(runs: readonly Told[]): Source[] {
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves.series)).filter((key) => key.startsWith('fates.')))
  const last = (key: string) => runs.reduce((sum, run) => sum + (run.curves.series[key]?.at(-1) ?? 0), 0)
  const first = (key: string) => (key === 'fates.trained' ? 0 : 1)
  return [...names]
    .sort((a, b) => first(a) - first(b) || last(b) - last(a))
    .slice(0, PALETTE)
    .map((key) => key.replace('fates.', ''))
    .map((name) => [name.replace('dropped: ', ''), fate(name)])
}

const newTrajectories = (curves: Curves) => increments(curves.trajectories)

/** Seconds of training until each update. They stand still while no process of the run works, and go on when it is
    resumed. Null for runs of an older dart, which did not say them with every update. */
export function trainSeconds(curves: Curves): readonly number[] | null {
  const told = curves.series['train_seconds'] ?? []
  const known = told.filter((seconds) => seconds !== null)
  return known.length === curves.updates.length ? known : null
}

function perMinute(curves: Curves): Values | null {
  const trained = trainSeconds(curves)
  const seconds = trained
    ? increments(trained)
    : curves.unix_seconds.map((at, i) => (i ? at - (curves.unix_seconds[i - 1] as number) : null))
  return ratio(newTrajectories(curves), seconds).map((value) => value && value * 60)
}

/** Earlier versions of dart wrote 0 where nothing had been sampled, as in imitation. */
function success(curves: Curves): Values | null {
  return of('success_rate')(curves)?.map((rate, i) => (rate || curves.trajectories[i] ? rate : null)) ?? null
}

const RECIPES: Record<string, { title: string; recipes: readonly Recipe[] }> = {
  episodes: {
    title: 'Episodes',
    recipes: [
      {
        title: 'Steps per trajectory',
        hint: 'Steps of the environments divided by trajectories, between two updates',
        fromZero: true,
        sources: [['steps', per('env_steps', newTrajectories)]],
      },
      {
        title: 'Fates',
        hint: 'Of the trajectories whose fate was decided between two updates, the share that was trained on, or dropped for a reason',
        unit: 'percent',
        fromZero: true,
        sources: fateSources,
      },
      {
        title: 'Unparsable steps',
        hint: 'Steps whose text could not be read as an action, between two updates',
        fromZero: true,
        sources: [['unparsable', added('unparsable')]],
      },
      {
        title: 'Pooled successes',
        hint: 'Copies of earlier successes that replaced failures, between two updates',
        fromZero: true,
        sources: [['pooled', added('pooled')]],
      },
    ],
  },
  policy: {
    title: 'Policy and loss',
    recipes: [
      {
        title: 'Entropy',
        hint: 'Mean entropy of the policy over the tokens that it wrote, in nats; dashed: the threshold from which a step is trained on',
        fromZero: true,
        sources: [
          ['entropy', of('entropy')],
          ['threshold', of('entropy_threshold')],
        ],
      },
      {
        title: 'KL',
        hint: 'From the reference policy; dashed: from the policy at the start of the update',
        sources: [
          ['reference', of('kl_reference')],
          ['old policy', of('kl_old')],
        ],
      },
      single('Clipped', 'clip_fraction', 'Share of tokens whose ratio was clipped', 'percent', true),
      {
        title: 'Importance weight',
        hint: 'Mean weight of a token, from the behaviour policy to the trained one; dashed: share that was truncated',
        sources: [
          ['weight', of('importance_weight')],
          ['truncated', of('importance_truncated')],
        ],
      },
      {
        title: 'Staleness',
        hint: 'Weight versions between sampling and training: mean of each update, and largest so far (dashed)',
        fromZero: true,
        sources: [
          ['mean', (c) => c.series['trainer.staleness'] ?? c.series['staleness.mean'] ?? null],
          ['max', of('staleness.max')],
        ],
      },
      single('Loss', 'loss'),
      single('Gradient norm', 'gradient_norm', 'Before clipping', 'number', true),
      single('Log-prob difference', 'logprob_difference', 'Mean absolute difference between the engine’s and the trainer’s log-probs', 'number', true),
      single('Learning rate', 'learning_rate', '', 'number', true),
    ],
  },
  speed: {
    title: 'Speed',
    recipes: [
      {
        title: 'Utilisation',
        hint: 'Share of the time since training began, or was last resumed, in which slots worked',
        unit: 'percent',
        fromZero: true,
        sources: [
          ['environments', of('env_utilisation')],
          ['replicas', of('rollout_utilisation')],
          ['trainer', of('trainer_utilisation')],
        ],
      },
      { title: 'Trajectories per minute', hint: 'Between two updates', fromZero: true, sources: [['trajectories', perMinute]] },
      {
        title: 'Actions per minute',
        hint: 'Since training began or was last resumed: sampled, and trained on (dashed)',
        fromZero: true,
        sources: [
          ['sampled', of('sampled_actions_per_minute')],
          ['trained', of('trained_actions_per_minute')],
        ],
      },
      single('Trainer’s tokens per second', 'tokens_per_second', 'While it computes an update', 'number', true),
      single('Seconds per update', 'update_seconds', '', 'number', true),
      single('Groups waiting', 'waiting_groups', 'Groups that could be trained on when the update began', 'number', true),
    ],
  },
}

/** Names that some chart above shows, and those that only repeat others. */
const SHOWN = new Set([
  ...'success_rate env_steps unparsable pooled entropy entropy_threshold kl_reference kl_old clip_fraction'.split(' '),
  ...'importance_weight importance_truncated loss gradient_norm logprob_difference learning_rate'.split(' '),
  ...'env_utilisation rollout_utilisation trainer_utilisation sampled_actions_per_minute'.split(' '),
  ...'trained_actions_per_minute tokens_per_second update_seconds waiting_groups'.split(' '),
  ...'trainer.staleness staleness.mean staleness.max staleness.trajectories seconds'.split(' '),
  ...'prompt_tokens cached_tokens'.split(' '), // `prefix_cached` is their ratio
])
const REPEATED = /^(fates|replica_versions)\./

/** Values on the x axis, one for each update. */
export function xs(run: Told, along: Along): readonly number[] {
  if (along === 'time') return trainSeconds(run.curves) ?? run.curves.unix_seconds.map((at) => at - run.started)
  return along === 'trajectories' ? run.curves.trajectories : run.curves.updates
}

function evaluationX(run: Told, point: EvaluationPoint, along: Along): number {
  if (along === 'updates') return point.update
  const trained = trainSeconds(run.curves)
  if (along === 'time' && !trained) return point.unix_seconds - run.started
  const at = run.curves.updates.findLastIndex((update) => update <= point.update)
  return (along === 'time' ? trained : run.curves.trajectories)?.[at] ?? 0
}

const sourcesOf = ({ sources }: Recipe, runs: readonly Told[]) => (typeof sources === 'function' ? sources(runs) : sources)

/** Several runs are told apart by colour, so that each part of a chart then gets a chart of its own. */
function plots(key: string, recipe: Recipe, runs: readonly Told[], along: Along): Plot[] {
  const sources = sourcesOf(recipe, runs)
  if (runs.length < 2 || sources.length < 2) return [plot(key, recipe, runs, along)]
  return sources.map((source) =>
    plot(`${key}:${source[0]}`, { ...recipe, title: `${recipe.title}: ${source[0]}`, sources: [source] }, runs, along),
  )
}

function plot(key: string, recipe: Recipe, runs: readonly Told[], along: Along): Plot {
  const sources = sourcesOf(recipe, runs)
  const lines = runs.flatMap((run, r) =>
    sources.flatMap(([name, values], k) => {
      const y = values(run.curves)
      if (!y || y.every((value) => value === null)) return []
      const told = runs.length > 1 ? { name: run.id, colour: r } : { name, colour: k }
      return [{ ...told, x: xs(run, along), y, dashed: sources.length === 2 && k === 1 }]
    }),
  )
  const { title, hint = '', unit = 'number', fromZero = false } = recipe
  return { key, title, hint, unit, fromZero, lines }
}

function heldOut(runs: readonly Told[], along: Along): Plot[] {
  const lines = runs.flatMap((run, r) =>
    [...groupBy(run.curves.evaluations, (point) => point.decoding)].map(([decoding, points], k) => ({
      decoding,
      name: runs.length > 1 ? run.id : decoding || 'held out',
      colour: runs.length > 1 ? r : k,
      x: points.map((point) => evaluationX(run, point, along)),
      y: points.map((point) => point.mean),
      low: points.map((point) => point.low),
      high: points.map((point) => point.high),
      points: true,
    })),
  )
  const hint = 'Success on instances that are never trained on, with 95 % intervals'
  const common = { hint, unit: 'percent', fromZero: true, most: 1 } as const
  if (runs.length < 2) return [{ key: 'held-out', title: 'Held-out success', ...common, lines }]
  return [...groupBy(lines, (line) => line.decoding)].map(([decoding, its]) => ({
    key: `held-out:${decoding}`,
    title: `Held-out success${decoding ? `: ${decoding}` : ''}`,
    ...common,
    lines: its,
  }))
}

/** From 0 to the furthest point of any run. */
export function extent(runs: readonly Told[], along: Along): [number, number] | null {
  const last = runs.flatMap((run) => [
    xs(run, along).at(-1) ?? 0,
    ...run.curves.evaluations.map((point) => evaluationX(run, point, along)),
  ])
  const most = Math.max(0, ...last)
  return most > 0 ? [0, most] : null
}

/** As many tasks as the server sends (`MOST_TASKS`). */
const MOST_TASKS = 64

function byTask(runs: readonly Told[], along: Along): Section {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.by_task)))].sort()
  const plots = names.map((name) => ({
    ...plot(`task:${name}`, { title: name, sources: [['success', (c) => c.by_task[name] ?? null]] }, runs, along),
    unit: 'percent' as const,
    fromZero: true,
    most: 1,
  }))
  const cut = runs.some((run) => Object.keys(run.curves.by_task).length >= MOST_TASKS)
  const note = cut ? `Only the first ${MOST_TASKS} tasks of a run by name; the page Tasks has all of them.` : ''
  return { key: 'tasks', title: 'Success by task', plots, small: true, note }
}

function others(runs: readonly Told[], along: Along): Section {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.series)))].sort()
  const rest = names.filter((name) => {
    const plain = name.replace(/^trainer\./, '')
    return !SHOWN.has(name) && !SHOWN.has(plain) && !REPEATED.test(name) && (plain === name || !names.includes(plain))
  })
  const plots = rest.map((name) => plot(`series:${name}`, { title: name, sources: [[name, of(name)]] }, runs, along))
  return { key: 'others', title: 'Everything else', plots, small: true }
}

/** All sections; plots that no run has values for are left out. */
export function sections(runs: readonly Told[], along: Along): Section[] {
  const training = plot(
    'success',
    {
      title: 'Training success',
      hint: 'Of the last training trajectories (stop.window)',
      unit: 'percent',
      fromZero: true,
      sources: [['success', success]],
    },
    runs,
    along,
  )
  const all: Section[] = [
    { key: 'success', title: 'Success', plots: [{ ...training, most: 1 }, ...heldOut(runs, along)] },
    ...Object.entries(RECIPES).map(([key, { title, recipes }]) => ({
      key,
      title,
      plots: recipes.flatMap((recipe) => plots(`${key}:${recipe.title}`, recipe, runs, along)),
    })),
    byTask(runs, along),
    others(runs, along),
  ]
  return all
    .map((section) => ({ ...section, plots: section.plots.filter((one) => one.lines.length) }))
    .filter((section) => section.plots.length)
}
