"""The launcher: the process that starts, watches, restarts and ends engine cores, front end and coordinator.

serve             `gateway serve`: the composition root; signals, exit codes, the ready line
launcher          everything of one endpoint, in order
rank_supervisor   the ranks' lives; `group_ledger` is its state machine
front_end_process, coordinator_process, control, listener, run_directory, ranks
multi_port        one endpoint per rank under one supervisor
__main__          the launcher as a child: of a user's script with `AsyncLLM` in it, or of the supervisor
"""
