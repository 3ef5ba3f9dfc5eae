"""Run by Alembic: the steps, on the connection and in the transaction of `dart.store.migrations.runner`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], target_metadata=None)
context.run_migrations()
