import { untrack } from 'svelte'

/** The keyboard: each page adds its own keys, and `?` lists all that work now. */

export interface Shortcut {
  /** As `KeyboardEvent.key` says it, two in a row with a space between: "ArrowLeft", "g r", "?". */
  keys: string
  /** What it does, for the list: "Next step". */
  does: string
  /** The heading that it stands under in the list: "Player". */
  group: string
  run: (event: KeyboardEvent) => void
}

const SEQUENCE_MILLISECONDS = 1000

class Keys {
  all = $state.raw<readonly Shortcut[]>([])
  #first = ''
  #since = 0

  add(shortcuts: readonly Shortcut[]): () => void {
    this.all = [...this.all, ...shortcuts]
    return () => (this.all = this.all.filter((one) => !shortcuts.includes(one)))
  }

  start(): void {
    addEventListener('keydown', (event) => this.#pressed(event))
  }

  #pressed(event: KeyboardEvent): void {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(event)) return
    const first = performance.now() - this.#since < SEQUENCE_MILLISECONDS ? this.#first : ''
    this.#first = ''
    const found = this.#find(first && `${first} ${event.key}`) ?? this.#find(event.key)
    if (found) {
      event.preventDefault()
      found.run(event)
    } else if (this.all.some((one) => one.keys.startsWith(`${event.key} `))) {
      this.#first = event.key
      this.#since = performance.now()
    }
  }

  /** Those that were added last come first: a dialog's before its page's. */
  #find(keys: string): Shortcut | undefined {
    return keys ? this.all.findLast((one) => one.keys === keys) : undefined
  }
}

/** Whether the key belongs to the element that has the focus. */
function isTyping(event: KeyboardEvent): boolean {
  const at = event.target
  if (!(at instanceof HTMLElement)) return false
  if (at.isContentEditable || at instanceof HTMLTextAreaElement || at instanceof HTMLSelectElement) return true
  if (at instanceof HTMLInputElement) return !['checkbox', 'radio', 'button', 'range'].includes(at.type)
  return (event.key === 'Enter' || event.key === ' ') && at.closest('button, a, summary') !== null
}

export const keys = new Keys()

/** Call while a component is set up: the keys work as long as it is there. */
export function shortcuts(list: readonly Shortcut[]): void {
  $effect(() => untrack(() => keys.add(list)))
}
