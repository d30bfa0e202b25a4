"""From an analysis and a budget to the next run."""
