/** What a live run tells while somebody looks: one EventSource per run, shared by all that watch it in this tab.

    A browser has six connections to a server, for all tabs together: a tab that is hidden lets go of its own, and asks
    for nothing. */
import { untrack } from 'svelte'
import { api, get } from './api'
import type { RunStatus } from './records'

export interface Pulse {
  /** Sequence number of the newest event. */
  last: number
  updates: number
  trajectories: number
  /** The run's state. */
  state: string
}

const POLL_MILLISECONDS = 5000
/** Less than for a page, because it is asked again. */
const POLL_SECONDS = 10
const PULSE_MILLISECONDS = 2000
const FAILURES_UNTIL_POLLING = 3
const RESUMED_MILLISECONDS = 15_000
/** The server sends something every ten seconds at the latest (`HEARTBEAT_SECONDS` in live.py). */
const SILENT_MILLISECONDS = 30_000
/** For a reader who only glances at another tab, nothing is connected anew. */
const HIDDEN_MILLISECONDS = 5000
const KINDS = ['status', 'events', 'problem', 'ended'] as const
type Kind = (typeof KINDS)[number]

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
  #silent: ReturnType<typeof setTimeout> | undefined
  #hidden: ReturnType<typeof setTimeout> | undefined
  /** What came while the tab was hidden, the newest of each kind: whatever it changed would be fetched. */
  #withheld = new Map<Kind, unknown>()
  #waiting: Pulse | null = null
  #pulsed = 0
  #failures = 0
  #asking = false
  /** Nothing more comes: the run is over, and will not be resumed. */
  #finished = false

  constructor(readonly run: string) {}

  /** Somebody looks. */
  start(): void {
    document.addEventListener('visibilitychange', this.#turned)
    if (!document.hidden) this.#open()
  }

  /** Nobody looks any more. */
  stop(): void {
    document.removeEventListener('visibilitychange', this.#turned)
    this.#close()
  }

  /** The reader has turned to another tab, or back to this one. */
  readonly #turned = (): void => {
    clearTimeout(this.#hidden)
    if (this.#finished) return
    if (document.hidden) {
      clearTimeout(this.#later)
      if (this.#waiting) this.#withhold('events', this.#waiting)
      this.#waiting = null
      this.#hidden = setTimeout(() => this.#close(), HIDDEN_MILLISECONDS)
      return
    }
    const came = [...this.#withheld]
    this.#withheld.clear()
    for (const [kind, data] of came) this.#take(kind, data)
    // The first that a stream tells is how everything is now.
    if (!this.#source) this.#open()
  }

  #open(): void {
    this.#close()
    this.#finished = false
    const source = (this.#source = new EventSource(api.stream(this.run)))
    this.#heard()
    source.onopen = () => {
      this.#failures = 0
      this.connection = 'open'
      clearInterval(this.#poll)
      this.#heard()
    }
    source.onerror = () => this.#failed()
    source.addEventListener('heartbeat', () => this.#heard())
    for (const kind of KINDS)
      source.addEventListener(kind, (event) => {
        this.#heard()
        const data: unknown = JSON.parse((event as MessageEvent<string>).data)
        if (document.hidden) this.#withhold(kind, data)
        else this.#take(kind, data)
      })
  }

  #close(): void {
    this.#source?.close()
    this.#source = null
    this.connection = 'connecting'
    for (const timer of [this.#poll, this.#later, this.#resumed, this.#silent, this.#hidden]) clearTimeout(timer)
    this.#withheld.clear()
    this.#waiting = null
  }

  #withhold(kind: Kind, data: unknown): void {
    this.#withheld.delete(kind) // its place is that of the newest
    this.#withheld.set(kind, data)
  }

  #take(kind: Kind, data: unknown): void {
    if (kind === 'status') {
      this.status = data as RunStatus
      this.problem = ''
    } else if (kind === 'events') {
      this.#pulse(data as Pulse)
      if ((data as Pulse).state === 'running') this.ended = false // it was resumed
    } else if (kind === 'problem') {
      this.problem = (data as { error: string }).error
    } else {
      if (this.#waiting) this.pulse = this.#waiting // no other comes
      this.ended = true
      this.#finished = (data as { state: string }).state === 'finished'
      this.#close()
      this.connection = 'open'
      // One that was interrupted may be resumed, by a person or by a cluster that puts it in its queue again.
      if (!this.#finished) this.#resumed = setInterval(() => void this.#look(), RESUMED_MILLISECONDS)
    }
  }

  /** Whether a run that was interrupted goes on. */
  async #look(): Promise<void> {
    if (document.hidden) return
    const overview = await get(api.run(this.run)).catch(() => null)
    if (overview?.run.state === 'running' && this.watchers && !this.#source && !document.hidden) this.#open()
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

  /** A connection that is only half open, after the computer has slept or a tunnel has died, never fails by itself. */
  #heard(): void {
    clearTimeout(this.#silent)
    this.#silent = setTimeout(() => {
      this.#source?.close()
      this.#source = null
      this.#fallBack()
    }, SILENT_MILLISECONDS)
  }

  /** A browser connects again on its own; until it has, the status is asked for as any other page. */
  #failed(): void {
    if (document.hidden) return this.#close() // it is opened again when somebody looks
    this.connection = 'connecting'
    const closed = this.#source?.readyState === EventSource.CLOSED
    if (++this.#failures < FAILURES_UNTIL_POLLING && !closed) return
    if (closed) {
      this.#source = null
      clearTimeout(this.#silent)
    }
    this.#fallBack()
  }

  #fallBack(): void {
    this.connection = 'polling'
    clearInterval(this.#poll)
    this.#poll = setInterval(() => void this.#ask(), POLL_MILLISECONDS)
    void this.#ask()
  }

  async #ask(): Promise<void> {
    if (this.#asking || document.hidden) return
    this.#asking = true
    try {
      const [status, pulse] = await Promise.all([
        get(api.status(this.run), undefined, POLL_SECONDS),
        get(api.pulse(this.run), undefined, POLL_SECONDS),
      ])
      if (!this.#polls()) return // the stream is back, and newer
      this.#take('status', status)
      this.#take('events', pulse)
      if (!this.#source) this.#open()
    } catch (error) {
      if (this.#polls()) this.problem = error instanceof Error ? error.message : String(error)
    } finally {
      this.#asking = false
    }
  }

  #polls(): boolean {
    return this.watchers > 0 && this.connection === 'polling' && !document.hidden
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
