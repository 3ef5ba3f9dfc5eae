/** Exponential moving averages of curves. */

/** `weight` from 0 (no smoothing) to below 1. The start is not drawn towards 0: early values are divided by the sum of
    their weights, as TensorBoard does. Missing values stay missing and change nothing. */
export function ema(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (!(weight > 0)) return [...values]
  let sum = 0
  let decay = 1
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null
    sum = weight * sum + (1 - weight) * value
    decay *= weight
    return sum / (1 - decay)
  })
}

/** What was added at each point to a number that only grows; a restart begins anew. */
export function increments(totals: readonly (number | null)[]): (number | null)[] {
  let before = 0
  return totals.map((total) => {
    if (total === null) return null
    const added = total - before
    before = total
    return added < 0 ? null : added
  })
}

/** `above` divided by `below`, point by point; missing where either is missing, or `below` is 0. */
export function ratio(above: readonly (number | null)[], below: readonly (number | null)[]): (number | null)[] {
  return above.map((a, i) => {
    const b = below[i] ?? null
    return a === null || b === null || b === 0 ? null : a / b
  })
}
