import { describe, expect, it } from 'vitest'
import { ema, increments, ratio } from './smoothing'

describe('smoothing', () => {
  it('by 0 changes nothing', () => expect(ema([1, null, 3], 0)).toEqual([1, null, 3]))

  it('is the weighted mean of what came before, without a pull to 0', () => {
    // Weights 0.5 and 0.25 of 0.75, then 0.5, 0.25, 0.125 of 0.875.
    const [a, b, c] = ema([4, 1, 7], 0.5) as number[]
    expect(a).toBeCloseTo(4)
    expect(b).toBeCloseTo((0.5 * 1 + 0.25 * 4) / 0.75)
    expect(c).toBeCloseTo((0.5 * 7 + 0.25 * 1 + 0.125 * 4) / 0.875)
  })

  it('passes missing values by', () => {
    const [a, b, c] = ema([4, null, 1], 0.5)
    expect([a, b]).toEqual([4, null])
    expect(c).toBeCloseTo(2)
  })

  it('keeps a constant constant', () => {
    for (const value of ema(Array.from({ length: 50 }, () => 0.3), 0.95)) expect(value).toBeCloseTo(0.3)
  })
})

describe('totals', () => {
  it('become what was added', () => expect(increments([3, 5, null, 9])).toEqual([3, 2, null, 4]))
  it('that fall began anew', () => expect(increments([5, 2, 4])).toEqual([5, null, 2]))
  it('are divided where both are known', () => expect(ratio([4, 6, null, 1], [2, 0, 3, null])).toEqual([2, null, null, null]))
})
