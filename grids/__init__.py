"""What to run: the grid specification, its expansion to cells, and the recipes of the paper."""
