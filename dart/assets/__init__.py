"""Models that ship with dart."""
