import { afterEach, expect, it, vi } from 'vitest'
import { copy } from './clipboard'

afterEach(() => vi.unstubAllGlobals())

it('says whether the text was copied', async () => {
  vi.stubGlobal('navigator', {})
  expect(await copy('a')).toBe(false)
  vi.stubGlobal('navigator', { clipboard: { writeText: () => Promise.reject(new Error('not allowed')) } })
  expect(await copy('a')).toBe(false)
  vi.stubGlobal('navigator', { clipboard: { writeText: () => Promise.resolve() } })
  expect(await copy('a')).toBe(true)
})
