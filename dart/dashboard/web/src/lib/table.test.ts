import { describe, expect, it } from 'vitest'
import { nearEnd, orderFrom, orderText, sorted, visible } from './table'

describe('orders', () => {
  it('are read as they are written', () => {
    for (const text of ['', 'name', '-name']) expect(orderText(orderFrom(text))).toBe(text)
  })

  it('sort numbers as numbers and names as people do, missing ones last', () => {
    const of = (values: (number | string | null)[], down: boolean) => sorted(values, (value) => value, down)
    expect(of([10, null, 9, 100], false)).toEqual([9, 10, 100, null])
    expect(of([10, null, 9, 100], true)).toEqual([100, 10, 9, null])
    expect(of(['env-10', 'env-9', 'env-1'], false)).toEqual(['env-1', 'env-9', 'env-10'])
  })

  it('keep equal rows as they were', () => {
    const rows = [{ n: 1, id: 'a' }, { n: 0, id: 'b' }, { n: 1, id: 'c' }]
    expect(sorted(rows, (row) => row.n, true).map((row) => row.id)).toEqual(['a', 'c', 'b'])
  })
})

describe('rows in sight', () => {
  it('are all of few', () => expect(visible(100, 30, 0, 900)).toEqual({ start: 0, end: 100 }))

  it('are followed by more only where the reader is, though all of few are drawn', () => {
    expect(nearEnd(100, 30, 0, 900)).toBe(false)
    expect(nearEnd(100, 30, 1800, 900)).toBe(true)
    expect(nearEnd(20, 30, -200, 900)).toBe(true) // they do not fill the screen
  })

  it('cover the screen and not much more', () => {
    for (const top of [-300, 0, 15_000, 299_000, 1e9]) {
      const { start, end } = visible(10_000, 30, top, 900)
      expect(start).toBeGreaterThanOrEqual(0)
      expect(end).toBeLessThanOrEqual(10_000)
      expect(end - start).toBeLessThan(60)
      if (top >= 0 && top < 299_000) {
        expect(start * 30).toBeLessThanOrEqual(top)
        expect(end * 30).toBeGreaterThanOrEqual(Math.min(top + 900, 300_000))
      }
    }
  })
})
