"""Decisions without I/O: plain objects, time as an argument, no await, and no imports from the rest of dart."""
