/** A list that comes in pages as the reader scrolls, newest first. */
import { get, type Address } from './api'

interface Source<Page, Row> {
  /** The page after `at`; empty for the first. */
  address: (at: string) => Address<Page>
  rows: (page: Page) => readonly Row[]
  /** Where the next page begins; empty if this was the last one. */
  next: (page: Page) => string
}

export class Pages<Page, Row> {
  rows = $state.raw<readonly Row[]>([])
  first = $state.raw<Page>()
  error = $state('')
  loading = $state(false)
  /** Nothing more is asked for: that was all, or a page did not come (`error`). */
  done = $state(false)
  #next = ''
  #abort = new AbortController()

  constructor(readonly source: Source<Page, Row>) {}

  /** Forget everything and begin with the first page; what is shown stays until that comes. */
  restart(): void {
    this.#abort.abort()
    this.#abort = new AbortController()
    this.#next = ''
    this.done = this.loading = false
    void this.more(true)
  }

  async more(fresh = false): Promise<void> {
    if (this.loading || (this.done && !fresh)) return
    this.loading = true
    const { signal } = this.#abort
    try {
      const page = await get(this.source.address(fresh ? '' : this.#next), signal)
      const rows = this.source.rows(page)
      this.rows = fresh ? rows : [...this.rows, ...rows]
      if (fresh) this.first = page
      this.#next = this.source.next(page)
      this.done = !this.#next
      this.error = ''
    } catch (error) {
      if (signal.aborted) return
      this.error = error instanceof Error ? error.message : String(error)
      this.done = true
    }
    this.loading = false
  }

  /** The first page as it is now; null if it does not come, or something else is asked for meanwhile. */
  async newest(): Promise<Page | null> {
    const { signal } = this.#abort
    const page = await get(this.source.address(''), signal).catch(() => null)
    return signal.aborted ? null : page
  }

  /** Keep the first rows alone, because a list that grows for days fills the page; the others come again if the reader
   * scrolls there. `at`: where the page after a row begins. */
  trim(most: number, at: (row: Row) => string): void {
    const last = this.rows[most - 1]
    if (this.loading || this.rows.length <= most || last === undefined) return
    this.rows = this.rows.slice(0, most)
    this.#next = at(last)
    this.done = false
  }

  /** What stands below `shown` rows ("12 events"). */
  end(shown: string, loading: string): string {
    if (this.error) return `${shown}; those that follow could not be loaded`
    return this.done ? `That is all: ${shown}` : loading
  }

  close(): void {
    this.#abort.abort()
  }
}
