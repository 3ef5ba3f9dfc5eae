/** Where the trajectories of a group part: two are on the same branch while they saw and did the same. */
import type { Member } from '../records'

/** For each member and step, the number of members that are still on its branch after that step. */
export function branches(members: readonly Member[]): number[][] {
  const counts = members.map((member) => member.steps.map(() => 0))
  const longest = Math.max(0, ...members.map((member) => member.steps.length))
  let groups = [members.map((_, index) => index)]
  for (let step = 0; step < longest; step++) {
    const next: number[][] = []
    for (const group of groups) {
      const apart = new Map<string, number[]>()
      for (const index of group) {
        const one = members[index]?.steps[step]
        if (!one) continue
        // Labels are short, and so alike for actions that are not.
        const key = `${one.image?.sha256 ?? ''} ${JSON.stringify(one.action)} ${one.label}`
        apart.set(key, [...(apart.get(key) ?? []), index])
      }
      next.push(...apart.values())
    }
    for (const group of next) for (const index of group) (counts[index] as number[])[step] = group.length
    groups = next
  }
  return counts
}
