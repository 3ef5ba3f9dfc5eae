import { describe, expect, it } from 'vitest'
import { Estimator, leftOverall } from './progress'

describe('time left', () => {
  it('follows the pace that was seen', () => {
    const estimator = new Estimator()
    expect(estimator.left()).toBeNull()
    for (let t = 0; t <= 20; t += 5) estimator.add(1000 + t, 0.1 + t / 100)
    expect(estimator.left()).toBeCloseTo(70)
  })

  it('begins anew when something else begins', () => {
    const estimator = new Estimator()
    for (let t = 0; t <= 20; t += 5) estimator.add(t, 0.5 + t / 100)
    estimator.add(25, 0.01)
    expect(estimator.left()).toBeNull()
  })

  it('grows while nothing moves, until nothing is known', () => {
    const estimator = new Estimator()
    for (let t = 0; t <= 100; t += 5) estimator.add(t, t / 200)
    expect(estimator.left()).toBeCloseTo(100)
    for (let t = 105; t <= 200; t += 5) estimator.add(t, 0.5)
    expect(estimator.left()).toBeCloseTo(200)
    for (let t = 205; t <= 800; t += 5) estimator.add(t, 0.5)
    expect(estimator.left()).toBeNull()
  })

  it('is a guess from the whole time at first', () => {
    expect(leftOverall(100, 0.25)).toBeCloseTo(300)
    expect(leftOverall(100, 0)).toBeNull()
    expect(leftOverall(100, 1)).toBeNull()
  })
})
