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

it('takes groups without steps', () => {
  expect(branches([])).toEqual([])
  expect(branches([member()])).toEqual([[]])
})
