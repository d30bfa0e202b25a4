"""From run folders, tidy tables and rows in memory to ``GridTables``: ``sources`` is what others call."""
