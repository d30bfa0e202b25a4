"""A grid run in virtual time: the decisions of scheduler and controller with modelled phases."""
