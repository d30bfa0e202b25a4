"""The control plane: command line, controller, run store and tracking."""
