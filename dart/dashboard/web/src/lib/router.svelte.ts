/** Where the reader is. Links are ordinary `<a href>`; a click on one of ours changes the page without loading it. */
import { match, query, type Query, type Route } from './routes'

class Router {
  path = $state(location.pathname)
  search = $state(location.search)
  readonly route: Route = $derived(match(this.path))
  readonly query: URLSearchParams = $derived(new URLSearchParams(this.search))
  #writing: ReturnType<typeof setTimeout> | undefined

  /** Where the reader is, also before it is written into the address. */
  get href(): string {
    return location.origin + this.path + this.search
  }

  /** A parameter of the address; empty if it is not there. */
  get(name: string): string {
    return this.query.get(name) ?? ''
  }

  go(href: string): void {
    this.#write()
    rememberScroll()
    history.pushState({ key: newKey() }, '', href)
    this.#read()
    scrollTo(0, 0)
  }

  /** Change parameters of this address. `push`: as a step that "back" undoes. Values that are empty are left out. */
  set(values: Query, push = false): void {
    const all: Query = { ...Object.fromEntries(this.query), ...values }
    const href = this.path + query(all)
    if (href === this.path + this.search) return
    if (push) {
      this.#write()
      rememberScroll()
      history.pushState({ key: newKey() }, '', href)
      this.#read()
      return
    }
    const changed = new URL(href, location.origin)
    this.path = changed.pathname
    this.search = changed.search
    // Browsers refuse more than some ten changes a second, and what follows the pointer has more.
    this.#writing ??= setTimeout(() => this.#write(), 200)
  }

  /** Write what `set` has changed into the address, if it is not there yet. */
  #write(): void {
    if (this.#writing === undefined) return
    clearTimeout(this.#writing)
    this.#writing = undefined
    history.replaceState(history.state, '', this.path + this.search)
  }

  start(): void {
    history.scrollRestoration = 'manual'
    if (!history.state?.key) history.replaceState({ key: newKey() }, '')
    addEventListener('scroll', rememberScroll, { passive: true })
    for (const own of ['wheel', 'touchstart', 'keydown']) addEventListener(own, stopRestoring, { passive: true })
    addEventListener('pagehide', () => this.#write())
    addEventListener('popstate', () => {
      clearTimeout(this.#writing)
      this.#writing = undefined
      const wanted = scrolls[history.state?.key]
      this.#read()
      restoreScroll(wanted)
    })
    document.addEventListener('click', (event) => {
      const link = (event.target as Element).closest?.('a')
      if (!link || event.defaultPrevented || event.button !== 0 || link.target || link.hasAttribute('download')) return
      if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey || link.origin !== location.origin) return
      if (link.pathname.startsWith('/api/') || (link.hash && link.pathname === location.pathname)) return
      event.preventDefault()
      this.go(link.pathname + link.search)
    })
  }

  #read(): void {
    this.path = location.pathname
    this.search = location.search
  }
}

const newKey = () => Math.random().toString(36).slice(2)
const scrolls: Record<string, number> = {}
let restoring = 0

function rememberScroll(): void {
  if (history.state?.key && !restoring) scrolls[history.state.key] = scrollY
}

/** Scroll to where the reader was, as soon as the page is long enough again. Gives up after two seconds. */
function restoreScroll(wanted = 0): void {
  stopRestoring()
  const until = performance.now() + 2000
  const attempt = () => {
    scrollTo(0, wanted)
    restoring = Math.abs(scrollY - wanted) < 2 || performance.now() > until ? 0 : requestAnimationFrame(attempt)
  }
  restoring = requestAnimationFrame(attempt)
}

/** The reader scrolls, and knows better. */
function stopRestoring(): void {
  cancelAnimationFrame(restoring)
  restoring = 0
}

export const router = new Router()
