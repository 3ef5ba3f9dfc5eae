"""Results of evaluated and collected episodes: outcomes, intervals, quotas."""
