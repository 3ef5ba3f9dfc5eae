"""Decisions without I/O: plain objects, time as an argument, nothing awaited, nothing of the rest imported."""
