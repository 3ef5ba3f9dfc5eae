// Writes src/lib/records.ts from the records that the server sends. `PYTHON` names the interpreter; otherwise the
// project's own virtual environment is used.
import { execFileSync } from 'node:child_process'
import { writeFileSync } from 'node:fs'
import { resolve } from 'node:path'
import { compile } from 'json-schema-to-typescript'

const project = resolve(import.meta.dirname, '../../../..')
const python = process.env.PYTHON ?? resolve(project, '.venv/bin/python')
const schema = JSON.parse(execFileSync(python, ['-m', 'dart.dashboard.schema'], { cwd: project, encoding: 'utf8' }))
const made = await compile(schema, 'Everything', {
  bannerComment: '/* Generated from dart/inspection/records.py by `npm run types`. Do not edit. */',
  unreachableDefinitions: true,
  style: { semi: false, singleQuote: true, printWidth: 120 },
})
// Remarks of the generator about itself.
const tidy = made
  .replace(/\n \*\n \* This interface was referenced by `Everything`'s JSON-Schema\n \* via the `definition` "\w+"\./g, '')
  .replace(/\/\*\*\n \* This interface was referenced by `Everything`'s JSON-Schema\n \* via the `definition` "\w+"\.\n \*\/\n/g, '')
  .replace(/ *\/\*\*\n *\* @minItems \d+\n(?: *\* @maxItems \d+\n)? *\*\/\n/g, '')
writeFileSync(resolve(import.meta.dirname, '../src/lib/records.ts'), tidy)
