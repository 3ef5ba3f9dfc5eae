import { describe, expect, it } from 'vitest'
import { listed, match, query, to, unlisted } from './routes'

describe('addresses', () => {
  it('are read as they are written', () => {
    const strange = 'a/b c%2F#?ü+'
    expect(match(to.runs())).toEqual({ page: 'runs' })
    expect(match(to.run('r-1'))).toEqual({ page: 'run', run: 'r-1' })
    expect(match(to.run(strange))).toEqual({ page: 'run', run: strange })
    expect(match(to.task('r', 'mini wob', strange))).toEqual({ page: 'task', run: 'r', suite: 'mini wob', name: strange })
    expect(match(to.trajectory('r', 'g000001-6'))).toEqual({ page: 'trajectory', run: 'r', id: 'g000001-6' })
    expect(match(to.group('r', 'g000001'))).toEqual({ page: 'group', run: 'r', id: 'g000001' })
    for (const page of ['workers', 'tasks', 'trajectories', 'events'] as const)
      expect(match(to[page]('r'))).toEqual({ page, run: 'r' })
    expect(match('/compare')).toEqual({ page: 'compare' })
  })

  it('that no page has are missing', () => {
    for (const path of ['/elsewhere', '/runs', '/runs/r/nothing', '/runs/r/groups', '/runs/r/groups/a/b', '/compare/x'])
      expect(match(path)).toEqual({ page: 'missing' })
  })

  it('hold lists of names of any kind', () => {
    const names = ['a,b', '100%', 'ü#?', 'plain']
    expect(unlisted(listed(names))).toEqual(names)
    expect(listed(['a', 'b'])).toBe('a,b')
    expect(unlisted('')).toEqual([])
  })

  it('survive broken percent signs', () => {
    expect(match('/runs/100%')).toEqual({ page: 'run', run: '100%' })
  })

  it('leave out empty parameters', () => {
    expect(query({ a: '', b: null, c: undefined, d: false, e: 0, f: 'x&y', g: true })).toBe('?e=0&f=x%26y&g=true')
    expect(query({ a: '' })).toBe('')
  })
})
