"""What work costs, what is left of it and who is next: pure decisions over records of phases."""
