/** What a live run tells while somebody looks: one EventSource per run, shared by all that watch it. */
import { untrack } from 'svelte'
import { api, get } from './api'
import type { RunStatus } from './records'

export interface Pulse {
  /** Sequence number of the newest event. */
  last: number
  updates: number
  trajectories: number
  /** The run's state. */
  state?: string
}

const POLL_MILLISECONDS = 5000
const PULSE_MILLISECONDS = 2000
const FAILURES_UNTIL_POLLING = 3
const RESUMED_MILLISECONDS = 15_000

export class Live {
  status = $state.raw<RunStatus>()
  pulse = $state.raw<Pulse>()
  /** True once the run is over. */
  ended = $state(false)
  connection = $state<'connecting' | 'open' | 'polling'>('connecting')
  /** Why the server cannot read the run now; empty if it can. */
  problem = $state('')
  watchers = 0
  #source: EventSource | null = null
  #poll: ReturnType<typeof setInterval> | undefined
  #later: ReturnType<typeof setTimeout> | undefined
  #resumed: ReturnType<typeof setInterval> | undefined
  #waiting: Pulse | null = null
  #pulsed = 0
  #failures = 0

  constructor(readonly run: string) {}

  start(): void {
    this.connection = 'connecting'
    const source = (this.#source = new EventSource(api.stream(this.run)))
    source.onopen = () => {
      this.#failures = 0
      this.connection = 'open'
      clearInterval(this.#poll)
    }
    source.onerror = () => this.#failed()
    const on = (kind: string, take: (data: unknown) => void) =>
      source.addEventListener(kind, (event) => take(JSON.parse((event as MessageEvent<string>).data)))
    on('status', (data) => {
      this.status = data as RunStatus
      this.problem = ''
    })
    on('events', (data) => {
      this.#pulse(data as Pulse)
      if ((data as Pulse).state === 'running') this.ended = false // it was resumed
    })
    on('problem', (data) => (this.problem = (data as { error: string }).error))
    on('ended', (data) => {
      if (this.#waiting) this.pulse = this.#waiting // no other comes
      this.ended = true
      this.stop()
      this.connection = 'open'
      // One that was interrupted may be resumed, by a person or by a cluster that puts it in its queue again.
      if ((data as { state: string }).state !== 'finished')
        this.#resumed = setInterval(() => void this.#look(), RESUMED_MILLISECONDS)
    })
  }

  stop(): void {
    this.#source?.close()
    this.#source = null
    clearInterval(this.#poll)
    clearTimeout(this.#later)
    clearInterval(this.#resumed)
    this.#waiting = null
  }

  /** Whether a run that was interrupted goes on. */
  async #look(): Promise<void> {
    if (document.hidden) return
    const overview = await get(api.run(this.run)).catch(() => null)
    if (overview?.run.state !== 'running' || !this.watchers || this.#source) return
    clearInterval(this.#resumed)
    this.start()
  }

  /** At most one pulse in two seconds, so that pages do not ask all the time. */
  #pulse(pulse: Pulse): void {
    clearTimeout(this.#later)
    const wait = this.#pulsed + PULSE_MILLISECONDS - Date.now()
    if (wait > 0) {
      this.#waiting = pulse
      this.#later = setTimeout(() => this.#pulse(pulse), wait)
      return
    }
    this.#pulsed = Date.now()
    this.#waiting = null
    this.pulse = pulse
  }

  /** A browser connects again on its own; until it has, the status is asked for as any other page. */
  #failed(): void {
    this.connection = 'connecting'
    if (++this.#failures < FAILURES_UNTIL_POLLING && this.#source?.readyState !== EventSource.CLOSED) return
    this.connection = 'polling'
    if (this.#source?.readyState === EventSource.CLOSED) this.#source = null
    clearInterval(this.#poll)
    this.#poll = setInterval(() => void this.#ask(), POLL_MILLISECONDS)
    void this.#ask()
  }

  async #ask(): Promise<void> {
    try {
      const [status, overview, newest] = await Promise.all([
        get(api.status(this.run)),
        get(api.run(this.run)),
        get(api.events(this.run, { limit: 1 })),
      ])
      if (!this.watchers || this.connection === 'open') return // the stream is back, and newer
      this.status = status
      this.problem = ''
      const { updates, trajectories } = overview.run
      this.#pulse({ last: newest.rows[0]?.sequence ?? 0, updates, trajectories })
    } catch (error) {
      if (this.watchers && this.connection !== 'open') this.problem = error instanceof Error ? error.message : String(error)
      return
    }
    if (this.#source) return
    clearInterval(this.#poll)
    this.start()
  }
}

/** Also of runs that nobody watches now: their last status appears at once when the reader comes back. */
const runs = new Map<string, Live>()

/** Call while a component is set up, in a block that is made anew for another run ({#key run}). */
export function watch(run: string): Live {
  const live = runs.get(run) ?? new Live(run)
  runs.set(run, live)
  $effect(() => {
    untrack(() => {
      if (live.watchers++ === 0) live.start()
    })
    return () => {
      // Later, because the next page of the same run may watch it in a moment.
      setTimeout(() => {
        if (--live.watchers === 0) live.stop()
      }, 1000)
    }
  })
  return live
}
