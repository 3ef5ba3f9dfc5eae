import { describe, expect, it } from 'vitest'
import type { Member } from '../records'
import { fateSentence, rollouts } from './words'

describe('fates', () => {
  it.each([
    ['trained', 'An update has trained on it.'],
    ['dropped', 'It was not trained on: no reason was recorded.'],
    ['dropped: a new reason', 'It was not trained on: a new reason.'],
    [
      'dropped: all failed',
      'It was not trained on, because its whole group failed: none did better than the others, so there was nothing to learn from.',
    ],
    ['dropped: stale', 'It was not trained on, because the policy had changed too much since it, or one of its group, was sampled.'],
  ])('"%s" is a sentence', (fate, text) => expect(fateSentence(fate)).toBe(text))
})

describe('the roll-outs of a group', () => {
  const member = (pooled_from = '') => ({ row: { pooled_from } }) as unknown as Member
  it('are counted without copies from the pool', () => {
    expect(rollouts(3, [member(), member(), member()])).toBe('3 of 3 roll-outs')
    expect(rollouts(3, [member(), member(), member(), member('g1-2')])).toBe('3 of 3 roll-outs, and 1 pooled success')
  })
})
