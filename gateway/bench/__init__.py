"""`gateway bench`: `workload` plans requests, `client` sends them and keeps times, `summary` says what it was like."""
