"""Measurements side by side, each a command that prints what it compared: ``python -m benchmarks.<name> --help``."""
