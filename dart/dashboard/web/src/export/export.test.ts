import { render } from 'svelte/server'
import { expect, it } from 'vitest'
import type { ImageRef, TrajectoryDetail } from '../lib/records'
import Export from './Export.svelte'

const image = (sha256: string, held = true): ImageRef => ({ sha256, width: 8, height: 8, held })
const row = { instruction: 'Buy <b>this</b>', success: false, reward: 0, termination: 'unparsable', fate: 'dropped: all failed', steps: 0, step_limit: 9, pooled_from: 'g0-1' }

it('shows all that the page shows', () => {
  const detail = { row, goal_images: [image('a'), image('a'), image('b', false)], evidence: null, state_reward: 1, steps: [] } as unknown as TrajectoryDetail
  const { body } = render(Export, { props: { detail, images: { a: 'data:image/png;base64,AA==' }, ended: false } })
  expect(body.match(/src="data:image\/png;base64,AA=="/g)).toHaveLength(2)
  expect(body).toContain('picture 3 is no longer in the run’s directory')
  expect(body).toContain('a copy of g0-1 from the pool')
  expect(body).toContain('The state that it left was worth 1.')
  expect(body).toContain('because its whole group failed')
  expect(body).not.toContain('<b>this')
})

it.each([
  [true, 'The run ended before an update took its group.'],
  [false, 'Its group is not decided yet'],
])('says of an undecided trajectory what it waits for only while its run went on (ended: %s)', (ended, words) => {
  const detail = { row: { ...row, kind: 'training', fate: 'pending' }, goal_images: [], steps: [] } as unknown as TrajectoryDetail
  expect(render(Export, { props: { detail, images: {}, ended } }).body).toContain(words)
})
