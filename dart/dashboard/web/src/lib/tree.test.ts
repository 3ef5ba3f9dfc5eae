import { expect, it } from 'vitest'
import { leaves } from './tree'

it('makes nested JSON flat, and loses nothing', () => {
  expect(leaves({ a: { b: 1, c: { d: 'x' } }, e: [1, 2], f: null, g: {} })).toEqual([
    { path: 'a.b', value: '1' },
    { path: 'a.c.d', value: 'x' },
    { path: 'e', value: '[1,2]' },
    { path: 'f', value: 'null' },
    { path: 'g', value: '{}' },
  ])
  expect(leaves({})).toEqual([])
})
