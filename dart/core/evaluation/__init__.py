"""What evaluated and collected episodes say: outcomes, intervals, quotas."""
