/** Nested JSON as a list of paths. */

export interface Leaf {
  /** "curation.pool.per_task". */
  path: string
  value: string
}

export function leaves(value: unknown, path = ''): Leaf[] {
  if (value !== null && typeof value === 'object' && !Array.isArray(value)) {
    const entries = Object.entries(value)
    if (entries.length || !path) return entries.flatMap(([name, inner]) => leaves(inner, path ? `${path}.${name}` : name))
  }
  return [{ path, value: typeof value === 'string' ? value : JSON.stringify(value) }]
}
