"""How a database of an older schema becomes one of this schema, in place: one step per version, by Alembic.

`dart_schema` says which version a database has, and is what every reader looks at; Alembic's own table of steps is
written in the same transaction. A new version is a file in `versions/`, numbered one higher, and the same change in
`dart.store.tables`. Only what is imported when a database has to be migrated is here, so that nothing else loads
Alembic.
"""
