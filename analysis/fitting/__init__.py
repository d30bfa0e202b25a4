"""From tables to curves, frontiers and laws with their intervals; ``analysis.findings`` joins the steps."""
