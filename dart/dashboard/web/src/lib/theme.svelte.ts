/** Light or dark: as the system says, unless the reader chose; the choice is remembered. */

export type Choice = 'system' | 'light' | 'dark'

const KEY = 'dart-theme'
const system = matchMedia('(prefers-color-scheme: dark)')

class Theme {
  choice = $state<Choice>(stored())
  #systemDark = $state(system.matches)
  readonly now: 'light' | 'dark' = $derived(
    this.choice === 'system' ? (this.#systemDark ? 'dark' : 'light') : this.choice,
  )

  start(): void {
    this.#show()
    system.addEventListener('change', (event) => {
      this.#systemDark = event.matches
      this.#show()
    })
  }

  choose(choice: Choice): void {
    this.choice = choice
    try {
      localStorage.setItem(KEY, choice)
    } catch {
      // Without storage, the choice lasts until the page is closed.
    }
    this.#show()
  }

  #show(): void {
    document.documentElement.dataset.theme = this.now
  }
}

function stored(): Choice {
  try {
    const choice = localStorage.getItem(KEY)
    return choice === 'light' || choice === 'dark' ? choice : 'system'
  } catch {
    return 'system'
  }
}

export const theme = new Theme()
