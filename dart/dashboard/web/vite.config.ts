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
  test: { include: ['src/**/*.test.ts'] },
})
