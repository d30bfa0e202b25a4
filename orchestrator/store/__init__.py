"""The run folder: the only source of truth about a run, and who may write it."""
