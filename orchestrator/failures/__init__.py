"""What went wrong, and what is done about it: pure decisions."""
