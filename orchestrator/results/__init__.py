"""What ``fit`` and ``prescribe`` read and print."""
