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

export class Resource<T> {
  /** The last answer; it stays while a newer one is fetched. */
  data = $state.raw<T>()
  /** Why there is no newer answer; empty if there is. */
  error = $state('')
  loading = $state(false)
  #address: Address<T> | null = null
  #abort: AbortController | null = null
  #again = false

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
      const value = await get(address, abort.signal)
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
}

/** Call while a component is set up. Fetches `address()` again whenever it changes; null: nothing is asked.
    `when()`: fetched again whenever it changes, for example a run's pulse. */
export function resource<T>(address: () => Address<T> | null, when?: () => unknown): Resource<T> {
  const it = new Resource<T>()
  $effect.pre(() => {
    const wanted = address()
    untrack(() => it.open(wanted))
  })
  if (when) {
    let before = when()
    $effect(() => {
      const now = when()
      if (now !== before) untrack(() => it.refresh())
      before = now
    })
  }
  $effect(() => () => it.close())
  return it
}
