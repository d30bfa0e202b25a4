"""Running a grid: the controller, and the life of a cell."""
