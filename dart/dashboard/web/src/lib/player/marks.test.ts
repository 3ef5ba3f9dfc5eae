import { describe, expect, it } from 'vitest'
import { fit, marks } from './marks'

const at = { x: 0.25, y: 0.5 }

describe('marks', () => {
  it('draws a ring for each click, with what is unusual about it', () => {
    expect(marks({ kind: 'click', at, button: 'left', count: 1, modifiers: [] })).toEqual([
      { kind: 'point', at, rings: 1, label: '' },
    ])
    expect(marks({ kind: 'click', at, button: 'right', count: 2, modifiers: ['Control_L'] })).toEqual([
      { kind: 'point', at, rings: 2, label: 'Control_L right' },
    ])
  })

  it('draws scrolls without a place in the middle', () => {
    expect(marks({ kind: 'scroll', at: null, dx: 0, dy: -3 })).toEqual([
      { kind: 'arrow', at: { x: 0.5, y: 0.5 }, dx: 0, dy: -1, label: '3 up' },
    ])
  })

  it('draws several actions in their order', () => {
    const both = { kind: 'several', actions: [{ kind: 'drag', path: [at, { x: 1, y: 1 }] }, { kind: 'type_text', text: 'a' }] }
    expect(marks(both).map((mark) => mark.kind)).toEqual(['path', 'chip'])
  })

  it('draws nothing for no action, and for what it does not know', () => {
    expect(marks(null)).toEqual([])
    expect(marks({ kind: 'new kind', at })).toEqual([])
    expect(marks({ kind: 'click', at: 'here' })).toEqual([])
  })
})

describe('fit', () => {
  it('enlarges small pictures by whole numbers and reduces large ones exactly', () => {
    expect(fit(96, 96, 700, 500)).toBe(5)
    expect(fit(1920, 1080, 960, 900)).toBe(0.5)
  })
})
