"""Decides which rank gets a request. Pure: no sockets, tasks or clocks, except in the coordinator's loop."""
