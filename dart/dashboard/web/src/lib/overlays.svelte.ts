/** The curves of several runs, which come one by one. */
import { api, get } from './api'
import type { Told } from './curves'

export class Overlays {
  #told = $state.raw<ReadonlyMap<string, Told>>(new Map())
  /** By run, why its curves cannot be shown. */
  errors = $state.raw<ReadonlyMap<string, string>>(new Map())
  #asked = new Set<string>()
  #running = new Set<string>()
  #abort = new AbortController()

  /** Of those runs that have come, in this order. */
  of(runs: readonly string[]): Told[] {
    return runs.flatMap((run) => this.#told.get(run) ?? [])
  }

  want(runs: readonly string[]): void {
    for (const run of runs) if (!this.#asked.has(run)) void this.fetch(run)
  }

  /** Ask again for those that were running. */
  refresh(): void {
    for (const run of this.#running) void this.fetch(run)
  }

  async fetch(run: string): Promise<void> {
    this.#asked.add(run)
    const signal = this.#abort.signal
    try {
      const [overview, curves] = await Promise.all([get(api.run(run), signal), get(api.curves(run), signal)])
      if (overview.run.state === 'running') this.#running.add(run)
      else this.#running.delete(run)
      this.#told = new Map(this.#told).set(run, { id: run, started: overview.run.started, curves })
      this.errors = new Map([...this.errors].filter(([id]) => id !== run))
    } catch (error) {
      this.#asked.delete(run) // whoever lays it over again asks again
      if (!signal.aborted) this.errors = new Map(this.errors).set(run, error instanceof Error ? error.message : String(error))
    }
  }

  close(): void {
    this.#abort.abort()
  }
}
