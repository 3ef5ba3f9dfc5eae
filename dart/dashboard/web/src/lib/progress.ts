/** How long something that reports its share done will still take. */

interface Seen {
  at: number
  share: number
}

const WINDOW_SECONDS = 600
const LEAST_SECONDS = 10
const APART_SECONDS = 1

/** Feed it what the run says, as it comes; times in seconds. */
export class Estimator {
  #seen: Seen[] = []

  /** Also a share that stays the same: it shows that the pace falls. */
  add(at: number, share: number): void {
    const last = this.#seen.at(-1)
    if (last && share < last.share) this.#seen = [] // another evaluation, another phase
    else if (last && at - last.at < APART_SECONDS) return
    this.#seen.push({ at, share })
    this.#seen = this.#seen.filter((one) => one.at >= at - WINDOW_SECONDS)
  }

  /** Seconds left; null while too little was seen. */
  left(): number | null {
    const [first, last] = [this.#seen[0], this.#seen.at(-1)]
    if (!first || !last || last.at - first.at < LEAST_SECONDS || last.share <= first.share) return null
    return ((1 - last.share) * (last.at - first.at)) / (last.share - first.share)
  }
}

/** From the whole time so far, for a reader who has just come. */
export function leftOverall(seconds: number, share: number): number | null {
  return share >= 0.01 && share < 1 && seconds > 0 ? (seconds * (1 - share)) / share : null
}
