"""Runs that last: under faults (`storm`), and for hours (`soak`), with every part real."""
