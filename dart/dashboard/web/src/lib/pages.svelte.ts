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

  close(): void {
    this.#abort.abort()
  }
}
