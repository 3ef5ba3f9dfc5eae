import { mount } from 'svelte'
import './styles/tokens.css'
import './styles/base.css'
import App from './App.svelte'
import { keys } from './lib/keys.svelte'
import { router } from './lib/router.svelte'
import { theme } from './lib/theme.svelte'

theme.start()
router.start()
keys.start()

mount(App, { target: document.getElementById('app') as HTMLElement })
