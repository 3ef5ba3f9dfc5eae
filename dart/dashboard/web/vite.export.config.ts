import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig, type Plugin } from 'vite'

/** One page with its script and style in it, which opens from a file. `dart.dashboard.exports.page` fills in the trajectory. */
function onePage(): Plugin {
  return {
    name: 'one-page',
    enforce: 'post',
    generateBundle(_, bundle) {
      let script = ''
      let style = ''
      for (const [name, file] of Object.entries(bundle)) {
        if (file.type === 'chunk') script += file.code
        else if (name.endsWith('.css')) style += String(file.source)
        delete bundle[name]
      }
      const safe = script.replaceAll('</script', '<\\/script')
      this.emitFile({
        type: 'asset',
        fileName: 'export.html',
        source: `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>dart</title>
<style>${style}</style>
</head>
<body>
<div id="app"></div>
<script type="application/json" id="trajectory"></script>
<script>${safe}</script>
</body>
</html>
`,
      })
    },
  }
}

export default defineConfig({
  plugins: [svelte(), onePage()],
  build: {
    outDir: process.env['DART_STATIC'] ?? '../static',
    emptyOutDir: false,
    target: 'es2022',
    cssCodeSplit: false,
    lib: { entry: 'src/export/main.ts', formats: ['iife'], name: 'dartExport' },
  },
})
