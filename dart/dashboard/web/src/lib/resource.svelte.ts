/** An answer of the server as state of a component. */
import { untrack } from 'svelte'
import { get, type Address } from './api'

/** The newest answers, so that a page that was left appears at once when the reader comes back. */
const kept = new Map<string, unknown>()
const MOST_KEPT = 24

function keep(address: string, value: unknown): void {
  kept.delete(address)
  kept.set(address, value)
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value as string)
}

/** For an answer that only grows: after the first time, no more is asked for than what is new. */
export interface Growth<T> {
  since: (before: T) => Address<T>
  /** Null if the two do not fit together: then everything is fetched again. */
  join: (before: T, newer: T) => T | null
}

/** What `when` says while it is of no use to ask again. */
export const RESTS = Symbol('rests')

export class Resource<T> {
  /** The last answer; it stays while a newer one is fetched. */
  data = $state.raw<T>()
  /** Why there is no newer answer; empty if there is. */
  error = $state('')
  loading = $state(false)
  #address: Address<T> | null = null
  #abort: AbortController | null = null
  #again = false
  #moment: unknown = RESTS

  constructor(readonly growth?: Growth<T>) {}

  /** What is wanted now; fetched again whenever the moment is another. */
  want(address: Address<T> | null, moment: unknown): void {
    if (address !== this.#address) {
      this.open(address)
      this.#moment = moment
    } else if (moment !== RESTS && moment !== this.#moment) {
      // It rested because of the answer at the address before: what was asked for since then is of this moment.
      const asked = this.#moment === RESTS
      this.#moment = moment
      if (!asked) this.refresh()
    }
  }

  /** Fetch the answer again; what is shown stays until it comes. */
  refresh(): void {
    if (this.#abort) this.#again = true
    else void this.#fetch()
  }

  open(address: Address<T> | null): void {
    if (address === this.#address) return
    this.close()
    this.#address = address
    this.error = ''
    this.data = address === null ? undefined : (kept.get(address) as T | undefined)
    if (address !== null) void this.#fetch()
  }

  close(): void {
    this.#abort?.abort()
    this.#abort = this.#address = null
    this.#again = this.loading = false
  }

  async #fetch(): Promise<void> {
    const address = this.#address
    if (address === null) return
    const abort = (this.#abort = new AbortController())
    this.loading = true
    try {
      const value = await this.#newer(address, abort.signal)
      if (abort.signal.aborted) return
      keep(address, value)
      this.data = value
      this.error = ''
    } catch (error) {
      if (abort.signal.aborted) return
      this.error = error instanceof Error ? error.message : String(error)
    }
    this.#abort = null
    this.loading = false
    if (this.#again) {
      this.#again = false
      void this.#fetch()
    }
  }

  async #newer(address: Address<T>, signal: AbortSignal): Promise<T> {
    const before = this.data
    if (!this.growth || before === undefined) return get(address, signal)
    return this.growth.join(before, await get(this.growth.since(before), signal)) ?? get(address, signal)
  }
}

/** A moment for what takes longer to fetch the more there is of it: another with each of the first `many`, with every
    second of the next `many`, and so on. */
export function thinned(n: number | undefined, many: number): number {
  return n ? Math.floor(n / Math.ceil(n / many)) : 0
}

/** Call while a component is set up. Fetches `address()` again whenever it changes; null: nothing is asked.
    `when(last)`, with the last answer: fetched again whenever it changes, for example a run's pulse, except while it is
    RESTS. */
export function resource<T>(
  address: () => Address<T> | null,
  when?: (last: T | undefined) => unknown,
  growth?: Growth<T>,
): Resource<T> {
  const it = new Resource<T>(growth)
  $effect.pre(() => {
    const [wanted, moment] = [address(), when?.(it.data)]
    untrack(() => it.want(wanted, moment))
  })
  $effect(() => () => it.close())
  return it
}
