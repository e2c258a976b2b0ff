"""One engine core per data-parallel rank: scheduler, paged KV cache, model runner, and the process around them.

Knows nothing of HTTP. The leaf modules (`messages`, `codec`, `config`, `block_hash`, `sampling_params`, `log`) need only the
standard library and msgpack, and are what the other two packages may import.
"""
