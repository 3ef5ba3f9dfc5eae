/** The server's answers, by address. `get(api.curves(run))` is a promise of `Curves`. */
import type {
  Comparison,
  Curves,
  Episodes,
  EventPage,
  GroupDetail,
  RunOverview,
  RunRow,
  RunStatus,
  Side,
  TaskDetail,
  TaskRow,
  Timeline,
  TrajectoryDetail,
  TrajectoryPage,
} from './records'
import type { Pulse } from './stream.svelte'
import { query, type Query } from './routes'

declare const answer: unique symbol
/** An address, with the type of what the server answers there. */
export type Address<T> = string & { readonly [answer]?: T }

const e = encodeURIComponent
const of = (run: string, rest = '', values?: Query) => `/api/runs/${e(run)}${rest}${query(values)}`

export const api = {
  runs: (): Address<RunRow[]> => '/api/runs',
  run: (run: string): Address<RunOverview> => of(run),
  status: (run: string): Address<RunStatus> => of(run, '/status'),
  pulse: (run: string): Address<Pulse> => of(run, '/pulse'),
  curves: (run: string): Address<Curves> => of(run, '/curves'),
  timeline: (run: string, values?: { from?: number; to?: number }): Address<Timeline> => of(run, '/timeline', values),
  episodes: (run: string, values?: { from?: number; to?: number }): Address<Episodes> => of(run, '/episodes', values),
  tasks: (run: string): Address<TaskRow[]> => of(run, '/tasks'),
  task: (run: string, suite: string, name: string): Address<TaskDetail> => of(run, `/tasks/${e(suite)}/${e(name)}`),
  trajectories: (run: string, values?: Query): Address<TrajectoryPage> => of(run, '/trajectories', values),
  trajectory: (run: string, id: string): Address<TrajectoryDetail> => of(run, `/trajectories/${e(id)}`),
  group: (run: string, id: string): Address<GroupDetail> => of(run, `/groups/${e(id)}`),
  events: (run: string, values?: Query): Address<EventPage> => of(run, '/events', values),
  sides: (run: string): Address<Side[]> => of(run, '/sides'),
  compare: (values: Query): Address<Comparison> => `/api/compare${query(values)}`,
  /** For `src`, not for `get`. */
  image: (run: string, sha256: string): string => of(run, `/images/${sha256}`),
  export: (run: string, id: string, form: 'html' | 'gif' | 'mp4'): string =>
    of(run, `/trajectories/${e(id)}/export.${form}`),
  stream: (run: string): string => of(run, '/stream'),
  lever: (run: string, lever: 'pause' | 'resume' | 'checkpoint' | 'drain'): string => of(run, `/${lever}`),
}

/** Within which a page has its data; a connection that is only half open would never answer. A large run of an older
    dart is copied first, which takes minutes. */
const ANSWER_SECONDS = 300
/** The coordinator has a minute for most levers. */
const LEVER_SECONDS = 90

/** The message is a sentence for the reader. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message)
  }
}

/** Raises ApiError, or an AbortError if `signal` says so. */
export async function get<T>(address: Address<T>, signal?: AbortSignal, seconds = ANSWER_SECONDS): Promise<T> {
  return ask(address, { signal }, seconds) as Promise<T>
}

/** For requests with an effect; answers what was done, in a few words. */
export async function post(address: string, seconds = LEVER_SECONDS): Promise<string> {
  return ((await ask(address, { method: 'POST' }, seconds)) as { done: string }).done
}

async function ask(address: string, options: RequestInit, seconds: number): Promise<unknown> {
  const both = new AbortController() // AbortSignal.any is too new for some browsers
  const abort = () => both.abort()
  let late = false
  const timer = setTimeout(() => {
    late = true
    abort()
  }, seconds * 1000)
  if (options.signal?.aborted) abort()
  options.signal?.addEventListener('abort', abort)
  let response: Response
  let text: string
  try {
    response = await fetch(address, { ...options, signal: both.signal, headers: { accept: 'application/json' } })
    text = await response.text()
  } catch (error) {
    if (options.signal?.aborted) throw error
    const said = late ? `has not answered within ${seconds} s` : 'does not answer'
    throw new ApiError(`The server ${said}. Is \`dart view\` still running, and the connection to it still there?`, 0)
  } finally {
    clearTimeout(timer)
    options.signal?.removeEventListener('abort', abort)
  }
  if (response.ok) return JSON.parse(text)
  throw new ApiError(sentence(text) || `The server answered with status ${response.status}.`, response.status)
}

function sentence(text: string): string {
  try {
    return String((JSON.parse(text) as { error?: unknown }).error ?? '')
  } catch {
    return ''
  }
}
