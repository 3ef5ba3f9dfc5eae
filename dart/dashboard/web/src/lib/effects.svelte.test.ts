import { flushSync } from 'svelte'
import { afterEach, expect, it, vi } from 'vitest'
import type { Address } from './api'
import { resource, RESTS } from './resource.svelte'

afterEach(() => vi.unstubAllGlobals())

it('a resource is asked for as its address and its moment change, once for each', async () => {
  let asked: string[] = []
  let count = 5
  vi.stubGlobal('fetch', (address: string) => {
    asked.push(address)
    return Promise.resolve(new Response(JSON.stringify(count)))
  })
  let pulse = $state(1)
  let window = $state('a')
  const start = () =>
    $effect.root(() => {
      resource(
        () => `/effects/${window}` as Address<number>,
        (last) => ((last ?? 0) > 10 ? RESTS : pulse),
      )
    })
  let stop = () => {}
  const next = async (change: () => void) => {
    asked = []
    change()
    flushSync()
    await new Promise((resolve) => setTimeout(resolve))
    flushSync()
    return asked
  }
  expect(await next(() => (stop = start()))).toEqual(['/effects/a'])
  expect(await next(() => pulse++)).toEqual(['/effects/a'])
  count = 20 // too many from now on
  expect(await next(() => pulse++)).toEqual(['/effects/a'])
  expect(await next(() => pulse++)).toEqual([])
  count = 5
  expect(await next(() => (window = 'b'))).toEqual(['/effects/b'])
  expect(await next(() => pulse++)).toEqual(['/effects/b'])
  stop()
  expect(await next(() => pulse++)).toEqual([])
})
