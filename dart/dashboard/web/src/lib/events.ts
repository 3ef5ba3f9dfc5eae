/** What an event is about, as links. */
import type { EventRow } from './records'
import { to } from './routes'

export interface Link {
  word: string
  href: string
}

/** "suite/name#seed" or "name", as events write tasks. A name may have slashes itself. */
export function taskOf(text: string): { suite: string; name: string } {
  const plain = text.replace(/#\d+$/, '')
  const at = plain === text ? -1 : plain.indexOf('/')
  return at > 0 ? { suite: plain.slice(0, at), name: plain.slice(at + 1) } : { suite: '', name: plain }
}

export function links(run: string, event: EventRow): Link[] {
  const text = (name: string) => (typeof event.data[name] === 'string' ? (event.data[name] as string) : '')
  const found: Link[] = []
  const add = (value: string, word: string, href: string) => {
    if (value && !found.some((link) => link.href === href)) found.push({ word, href })
  }
  const group = text('group')
  add(group, `group ${group}`, to.group(run, group))
  for (const name of ['trajectory', 'success', 'replaced']) {
    const id = text(name)
    add(id, name === 'trajectory' ? id : `${name} ${id}`, to.trajectory(run, id))
  }
  const task = taskOf(text('task'))
  add(
    task.name,
    task.name,
    task.suite ? to.task(run, task.suite, task.name) : to.tasks(run, { text: task.name }),
  )
  for (const name of ['worker', 'replica']) add(text(name), text(name), to.workers(run, { search: text(name) }))
  const update = event.data['update']
  if (typeof update === 'number' && update > 0)
    add(String(update), `update ${update}`, to.run(run, { zoom: `${Math.max(0, update - 10)}~${update + 10}` }))
  return found
}

const TROUBLE =
  /^(stalled|failed|attempt_failed|given_up|sync_failed|violation|trainer_lost|checkpoint_failed|checkpoint_broken|task_quarantined|left_out)$/

export const isTrouble = (kind: string): boolean => TROUBLE.test(kind)

/** Newest first, each once. */
export function merged(newer: readonly EventRow[], older: readonly EventRow[]): EventRow[] {
  const all = new Map([...older, ...newer].map((row) => [row.sequence, row]))
  return [...all.values()].sort((a, b) => b.sequence - a.sequence)
}
