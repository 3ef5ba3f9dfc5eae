/** The time, for "5 min ago": one clock for the whole page. */

class Now {
  seconds = $state(Date.now() / 1000)

  constructor() {
    setInterval(() => {
      if (!document.hidden) this.seconds = Date.now() / 1000
    }, 1000)
    document.addEventListener('visibilitychange', () => (this.seconds = Date.now() / 1000))
  }
}

export const now = new Now()
