/** The addresses of the pages: written by `to`, read by `match`. */

export type Route =
  | { page: 'runs' | 'compare' | 'missing' }
  | { page: 'run' | 'workers' | 'tasks' | 'trajectories' | 'events'; run: string }
  | { page: 'task'; run: string; suite: string; name: string }
  | { page: 'trajectory' | 'group'; run: string; id: string }

export type Query = Record<string, string | number | boolean | null | undefined>

const e = encodeURIComponent

/** `?a=1&b=2` without the empty ones, or nothing. */
export function query(values: Query = {}): string {
  const kept = new URLSearchParams()
  for (const [name, value] of Object.entries(values))
    if (value !== null && value !== undefined && value !== '' && value !== false) kept.set(name, String(value))
  const text = kept.toString()
  return text ? `?${text}` : ''
}

export const to = {
  runs: (values?: Query) => `/${query(values)}`,
  run: (run: string, values?: Query) => `/runs/${e(run)}${query(values)}`,
  workers: (run: string, values?: Query) => `/runs/${e(run)}/workers${query(values)}`,
  tasks: (run: string, values?: Query) => `/runs/${e(run)}/tasks${query(values)}`,
  task: (run: string, suite: string, name: string, values?: Query) =>
    `/runs/${e(run)}/tasks/${e(suite)}/${e(name)}${query(values)}`,
  trajectories: (run: string, values?: Query) => `/runs/${e(run)}/trajectories${query(values)}`,
  trajectory: (run: string, id: string, values?: Query) => `/runs/${e(run)}/trajectories/${e(id)}${query(values)}`,
  group: (run: string, id: string, values?: Query) => `/runs/${e(run)}/groups/${e(id)}${query(values)}`,
  events: (run: string, values?: Query) => `/runs/${e(run)}/events${query(values)}`,
  compare: (values?: Query) => `/compare${query(values)}`,
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part)
  } catch {
    return part
  }
}

/** Names in one parameter, as in `with=a,b`; a comma within a name is written "%2C". */
export const listed = (names: readonly string[]): string => names.map((name) => name.replace(/[%,]/g, e)).join(',')
export const unlisted = (text: string): string[] => text.split(',').filter(Boolean).map(decode)

export function match(path: string): Route {
  const [first, run, kind, a, ...rest] = path.replace(/^\/|\/$/g, '').split('/').map(decode)
  if (!first) return { page: 'runs' }
  if (first === 'compare' && run === undefined) return { page: 'compare' }
  if (first !== 'runs' || !run) return { page: 'missing' }
  if (kind === undefined) return { page: 'run', run }
  if (a === undefined)
    return kind === 'workers' || kind === 'tasks' || kind === 'trajectories' || kind === 'events'
      ? { page: kind, run }
      : { page: 'missing' }
  if (kind === 'tasks' && rest.length > 0) return { page: 'task', run, suite: a, name: rest.join('/') }
  if (kind === 'trajectories' && rest.length === 0) return { page: 'trajectory', run, id: a }
  if (kind === 'groups' && rest.length === 0) return { page: 'group', run, id: a }
  return { page: 'missing' }
}
