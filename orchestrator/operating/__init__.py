"""What people ask of a grid or a run: plans, status, explanations, housekeeping."""
