import { expect, it } from 'vitest'
import type { Member } from '../records'
import { branches } from './branches'

const member = (...steps: [string, string][]): Member =>
  ({ steps: steps.map(([sha256, label], index) => ({ index, label, image: { sha256 }, action: null, advantage: null })) }) as unknown as Member

it('counts who is still on the same branch', () => {
  const members = [
    member(['a', 'click'], ['b', 'click'], ['c', 'click']),
    member(['a', 'click'], ['b', 'type'], ['c', 'click']),
    member(['a', 'click'], ['b', 'click']),
  ]
  expect(branches(members)).toEqual([
    [3, 2, 1],
    [3, 1, 1],
    [3, 2],
  ])
})

it('parts where actions differ that look alike in short', () => {
  const clicking = (x: number) =>
    ({ steps: [{ index: 0, label: 'click (0.50, 0.25)', image: { sha256: 'a' }, action: { kind: 'click', at: { x, y: 0.25 } }, advantage: null }] }) as unknown as Member
  expect(branches([clicking(0.496), clicking(0.504), clicking(0.504)])).toEqual([[1], [2], [2]])
})

it('takes groups without steps', () => {
  expect(branches([])).toEqual([])
  expect(branches([member()])).toEqual([[]])
})
