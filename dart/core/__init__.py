"""Decisions without I/O: plain objects, time as an argument, nothing awaited, nothing imported from the rest of dart."""
