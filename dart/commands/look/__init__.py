"""Commands that look at a run, live or past. `status` and `why` migrate an older database; nothing else is changed."""
