import { afterEach, beforeEach, expect, it, vi } from 'vitest'
import type { Address } from './api'
import { Resource, RESTS, thinned, type Growth } from './resource.svelte'

type Answer = { end: number; seen: number[] }
let asked: string[] = []
let answers: Record<string, Answer> = {}
let tests = 0
/** What was fetched is kept between resources. */
const fresh = (name: string) => `/${++tests}/${name}` as Address<Answer>
const settled = () => new Promise((resolve) => setTimeout(resolve))

beforeEach(() => {
  asked = []
  answers = {}
  vi.stubGlobal('fetch', (address: string) => {
    asked.push(address)
    return Promise.resolve(new Response(JSON.stringify(answers[address] ?? { end: 0, seen: [] })))
  })
})
afterEach(() => vi.unstubAllGlobals())

it('is fetched again at another moment, but not while that is of no use', async () => {
  const [one, two] = [fresh('one'), fresh('two')]
  const it = new Resource<Answer>()
  const want = async (address: Address<Answer>, moment: unknown) => {
    it.want(address, moment)
    await settled()
    return asked.splice(0)
  }
  expect(await want(one, '1')).toEqual([one])
  expect(await want(one, '1')).toEqual([])
  expect(await want(one, '2')).toEqual([one])
  expect(await want(one, RESTS)).toEqual([])
  expect(await want(one, '2')).toEqual([])
  // The reader goes elsewhere while it rests: it is asked there once, and again from the next moment on.
  expect(await want(two, RESTS)).toEqual([two])
  expect(await want(two, '5')).toEqual([])
  expect(await want(two, '6')).toEqual([two])
})

const growth = (address: string): Growth<Answer> => ({
  since: (before) => `${address}?from=${before.end}` as Address<Answer>,
  join: (before, newer) => (newer.seen[0] === -1 ? null : { end: newer.end, seen: [...before.seen, ...newer.seen] }),
})

it('that grows is asked for what is new, also by a page that comes back to it', async () => {
  const address = fresh('timeline')
  answers = { [address]: { end: 3, seen: [1, 2, 3] }, [`${address}?from=3`]: { end: 4, seen: [4] } }
  const it = new Resource<Answer>(growth(address))
  it.open(address)
  await settled()
  it.refresh()
  await settled()
  expect(it.data).toEqual({ end: 4, seen: [1, 2, 3, 4] })
  it.close()
  const again = new Resource<Answer>(growth(address))
  again.open(address)
  expect(again.data?.seen).toEqual([1, 2, 3, 4])
  await settled()
  expect(asked).toEqual([address, `${address}?from=3`, `${address}?from=4`])
})

it('that does not fit what it was is fetched as a whole', async () => {
  const address = fresh('timeline')
  answers = { [address]: { end: 3, seen: [1, 2, 3] }, [`${address}?from=3`]: { end: 1, seen: [-1] } }
  const it = new Resource<Answer>(growth(address))
  it.open(address)
  await settled()
  answers[address] = { end: 1, seen: [7] }
  it.refresh()
  await settled()
  expect(it.data).toEqual({ end: 1, seen: [7] })
  expect(asked).toEqual([address, `${address}?from=3`, address])
})

it('is asked for less often the more there is of it', () => {
  const moments = (from: number, to: number) => new Set(Array.from({ length: to - from }, (_, i) => thinned(from + i, 100)))
  expect([thinned(undefined, 100), thinned(0, 100)]).toEqual([0, 0])
  expect([moments(1, 101).size, moments(101, 201).size, moments(901, 1001).size]).toEqual([100, 51, 11])
})
