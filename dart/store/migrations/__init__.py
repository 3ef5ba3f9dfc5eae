"""Upgrades a database with an older schema to this one, in place: one Alembic step per version.

The table `dart_schema` holds the version of a database, and every reader checks it; Alembic's own table of steps is
written in the same transaction. To add a version, add a file to `versions/`, numbered one higher, and make the same
change in `dart.store.tables`. This package is imported only when a database has to be migrated, so that nothing else
loads Alembic.
"""
