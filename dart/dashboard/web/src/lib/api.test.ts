import { afterEach, expect, it, vi } from 'vitest'
import { get, post } from './api'

/** A connection that is only half open: it takes the question, and never answers. */
const halfOpen = (_: string, { signal }: RequestInit) =>
  new Promise<Response>((_, reject) => signal?.addEventListener('abort', () => reject(signal.reason)))

afterEach(() => vi.unstubAllGlobals())

it('does not wait for ever for a server that takes a question and never answers', async () => {
  vi.stubGlobal('fetch', halfOpen)
  const words = 'The server has not answered within 0.02 s. Is `dart view` still running, and the connection to it still there?'
  await expect(get('/api/runs', undefined, 0.02)).rejects.toThrow(words)
  await expect(get('/api/runs', new AbortController().signal, 0.02)).rejects.toThrow(words)
  await expect(post('/api/runs/r/pause', 0.02)).rejects.toThrow(words)
})

it('does not wait for the rest of an answer that stops in the middle', async () => {
  vi.stubGlobal('fetch', async (_: string, { signal }: RequestInit) => {
    const body = new ReadableStream({ start: (it) => signal?.addEventListener('abort', () => it.error(signal.reason)) })
    return new Response(body)
  })
  await expect(get('/api/runs', undefined, 0.02)).rejects.toThrow(/has not answered within/)
})

it('tells a question that was taken back from one without an answer', async () => {
  vi.stubGlobal('fetch', halfOpen)
  const abort = new AbortController()
  const asked = get('/api/runs', abort.signal)
  abort.abort()
  await expect(asked).rejects.toMatchObject({ name: 'AbortError' })
  vi.stubGlobal('fetch', () => Promise.reject(new TypeError('refused')))
  await expect(get('/api/runs')).rejects.toThrow(/^The server does not answer/)
})
