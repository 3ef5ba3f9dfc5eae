"""Commands that look at a run, live or past, and change nothing in its directory."""
