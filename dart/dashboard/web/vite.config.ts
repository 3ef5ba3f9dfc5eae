import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vitest/config'

// The server answers /assets/NAME, and index.html for every page.
export default defineConfig({
  plugins: [svelte()],
  build: {
    outDir: process.env.DART_STATIC ?? '../static',
    emptyOutDir: true,
    target: 'es2022',
    chunkSizeWarningLimit: 900,
  },
  server: {
    proxy: { '/api': { target: process.env.DART_VIEW ?? 'http://127.0.0.1:8700', changeOrigin: true } },
  },
  test: {
    projects: [
      { extends: true, test: { name: 'server', include: ['src/**/*.test.ts'], exclude: ['src/**/*.svelte.test.ts'] } },
      // Effects run only in code that is compiled for a browser.
      {
        extends: true,
        test: { name: 'browser', include: ['src/**/*.svelte.test.ts'], environment: './scripts/in-browser.mjs' },
      },
    ],
  },
})
