"""A grid in MLflow: written off the critical path, and read back."""
