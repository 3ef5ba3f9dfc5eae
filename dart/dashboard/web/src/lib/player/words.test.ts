import { describe, expect, it } from 'vitest'
import type { Member } from '../records'
import { fateSentence, lastScreen, rollouts, tail } from './words'

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
  ])('"%s" is a sentence', (fate, text) => expect(fateSentence(fate, 'training', false)).toBe(text))

  it('of what is pending say what it waits for, or that the run has ended', () => {
    expect(fateSentence('pending', 'training', false)).toBe('Its group is not decided yet, or waits for the trainer.')
    expect(fateSentence('pending', 'training', true)).toBe('The run ended before an update took its group.')
    expect(fateSentence('pending', 'evaluation', false)).toBe('Its evaluation is not over.')
  })
})

describe('the roll-outs of a group', () => {
  const member = (pooled_from = '') => ({ row: { pooled_from } }) as unknown as Member
  const group = (members: Member[]) => ({ kind: 'training', planned: 3, closed: 1, members })
  it('are counted without copies from the pool', () => {
    expect(rollouts(group([member(), member(), member()]))).toBe('3 of 3 roll-outs')
    expect(rollouts(group([member(), member(), member(), member('g1-2')]))).toBe('3 of 3 roll-outs, and 1 pooled success')
  })

  it('name those that never finished, once no more come', () => {
    expect(rollouts({ ...group([member()]), closed: null })).toBe('1 of 3 roll-outs')
    expect(rollouts(group([member()]))).toBe('1 of 3 roll-outs, 2 never finished')
  })

  it('are not those that a collection keeps, which stores only successes', () => {
    expect(rollouts({ ...group([member()]), kind: 'collected' })).toBe('1 kept success')
  })
})

it('a long id is shown by its end, and a last screenshot says whether an action followed', () => {
  expect(tail('g000001-1')).toBe('g000001-1')
  expect(tail('eval-before-greedy-v0-task-0001-17-1')).toBe('…ask-0001-17-1')
  expect(lastScreen('finished', false)).toContain('the last screen')
  expect(lastScreen('step_limit', false)).toContain('is not kept')
  expect(lastScreen('step_limit', true)).toContain('after the last action')
})
