"""The balancer in virtual time: its own policies and ledger, and the engines' own scheduler, over a trace of requests.

Nothing here waits, and nothing is drawn but from a seeded generator: equal arguments give equal results.
"""
