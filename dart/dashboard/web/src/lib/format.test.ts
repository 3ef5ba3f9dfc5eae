import { describe, expect, it } from 'vitest'
import { compact, count, duration, NONE, number, percent, points, relative, stretch } from './format'

describe('numbers', () => {
  it.each([
    [0, '0'],
    [12345, '12,345'],
    [0.30864, '0.3086'],
    [123456.7, '123,457'],
    [0.0000321, '3.2e−5'],
    [-2.5, '-2.5'],
    [null, NONE],
    [NaN, NONE],
  ])('%s is %s', (value, text) => expect(number(value)).toBe(text))

  it.each([
    [980, '980'],
    [12_345, '12.3k'],
    [4_170_068, '4.17M'],
    [1.2e12, '1.2T'],
    [0.25, '0.25'],
  ])('%s in short is %s', (value, text) => expect(compact(value)).toBe(text))

  it.each([
    [0, '0 %'],
    [0.3086, '31 %'],
    [0.004, '0.4 %'],
    [0.995, '99.5 %'],
    [0.9999, '99.9 %'],
    [1, '100 %'],
    [null, NONE],
  ])('the share %s is %s', (share, text) => expect(percent(share)).toBe(text))

  it.each([
    [0.05, '+5.0'],
    [-0.012, '−1.2'],
    [0, '+0.0'],
    [-0.0001, '+0.0'],
  ])('the difference %s is %s percentage points', (difference, text) => expect(points(difference)).toBe(text))

  it('is one, or many', () => {
    expect(count(1, 'run')).toBe('1 run')
    expect(count(1200, 'trajectory', 'trajectories')).toBe('1,200 trajectories')
  })
})

describe('times', () => {
  it('of another day say which', () => {
    const noon = new Date(2026, 10, 25, 12).getTime() / 1000
    expect(stretch(noon, noon + 3600)).toBe('2026-11-25 12:00:00 to 13:00:00')
    expect(stretch(noon, noon + 86_400)).toBe('2026-11-25 12:00:00 to 2026-11-26 12:00:00')
  })

  it.each([
    [0.42, '0.4 s'],
    [9.96, '10 s'],
    [45.4, '45 s'],
    [59.6, '1 min'],
    [192, '3 min 12 s'],
    [7500, '2 h 5 min'],
    [273_600, '3 d 4 h'],
  ])('%s seconds are %s', (seconds, text) => expect(duration(seconds)).toBe(text))

  it.each([
    [2, 'now'],
    [42, '42 s ago'],
    [330, '5 min ago'],
    [7300, '2 h ago'],
    [-7300, 'in 2 h'],
    [200_000, '2 d ago'],
  ])('%s seconds before now is %s', (ago, text) => expect(relative(1_800_000_000 - ago, 1_800_000_000)).toBe(text))
})
