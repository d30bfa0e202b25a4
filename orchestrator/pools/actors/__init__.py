"""The Ray actors of the pools, each in a file of its own: its process imports no more than it needs, and starts the sooner."""
