/** The time, for "5 min ago": one clock for the whole page. */

class Now {
  seconds = $state(Date.now() / 1000)

  constructor() {
    // What is fetched again as time goes on is not fetched for a page that nobody sees.
    const tick = () => {
      if (!document.hidden) this.seconds = Date.now() / 1000
    }
    setInterval(tick, 1000)
    document.addEventListener('visibilitychange', tick)
  }
}

export const now = new Now()
