"""Ray jobs, and the services of this machine."""
