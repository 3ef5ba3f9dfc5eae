import { afterEach, describe, expect, it, vi } from 'vitest'
import type { Address } from './api'
import { Pages } from './pages.svelte'

interface Page {
  rows: number[]
  next: string
}

const settled = () => new Promise((resolve) => setTimeout(resolve))
const answer = (page: Page) => new Response(JSON.stringify(page))
const pages = () =>
  new Pages<Page, number>({ address: (at) => `/${at}` as Address<Page>, rows: (page) => page.rows, next: (page) => page.next })

afterEach(() => vi.unstubAllGlobals())

describe('a list in pages', () => {
  it('does not say that it is whole when a page did not come', async () => {
    vi.stubGlobal('fetch', (address: string) =>
      address === '/' ? Promise.resolve(answer({ rows: [1, 2], next: 'b' })) : Promise.reject(new TypeError('offline')),
    )
    const it = pages()
    await it.more(true)
    expect(it.end('2 rows', 'Loading')).toBe('Loading')
    await it.more()
    expect(it.rows).toEqual([1, 2])
    expect(it.done).toBe(true) // nothing is asked again and again
    expect(it.end('2 rows', 'Loading')).toBe('2 rows; those that follow could not be loaded')
  })

  it('says so when it is', async () => {
    vi.stubGlobal('fetch', () => Promise.resolve(answer({ rows: [1], next: '' })))
    const it = pages()
    await it.more(true)
    expect(it.end('1 row', 'Loading')).toBe('That is all: 1 row')
  })

  it('forgets news that come after another question', async () => {
    const waiting: ((page: Response) => void)[] = []
    vi.stubGlobal('fetch', () => new Promise<Response>((resolve) => waiting.push(resolve)))
    const it = pages()
    const news = it.newest()
    it.restart()
    waiting[0]?.(answer({ rows: [9], next: '' }))
    expect(await news).toBeNull()
    waiting[1]?.(answer({ rows: [5], next: '' }))
    await settled()
    expect(it.rows).toEqual([5])
  })

  it('lets go of rows that new ones have pushed far down, and asks for them again', async () => {
    const asked: string[] = []
    vi.stubGlobal('fetch', (address: string) => {
      asked.push(address)
      return Promise.resolve(answer({ rows: [5, 4, 3, 2, 1], next: '' }))
    })
    const it = pages()
    await it.more(true)
    it.trim(5, String)
    expect([it.rows.length, it.done]).toEqual([5, true])
    it.trim(2, String)
    expect([it.rows, it.done]).toEqual([[5, 4], false])
    await it.more()
    expect(asked).toEqual(['/', '/4'])
  })
})
