import { mount } from 'svelte'
import '../styles/tokens.css'
import '../styles/base.css'
import { keys } from '../lib/keys.svelte'
import type { TrajectoryDetail } from '../lib/records'
import Export from './Export.svelte'

const told = JSON.parse(document.getElementById('trajectory')?.textContent || 'null') as {
  detail: TrajectoryDetail
  images: Record<string, string>
  ended: boolean
} | null
const target = document.getElementById('app') as HTMLElement

document.documentElement.dataset['theme'] = matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'
keys.start()
if (told) {
  document.title = told.detail.row.id
  mount(Export, { target, props: told })
} else target.textContent = 'This is the template of an export; it holds no trajectory.'
