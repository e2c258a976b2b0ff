"""One module per group of routes; each has `routes`, which the application adds."""
