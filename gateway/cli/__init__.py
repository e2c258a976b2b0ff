"""The subcommands of `gateway`: thin shells that parse, call one function and print."""
