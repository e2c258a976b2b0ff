"""One engine core per data-parallel rank: scheduler, paged KV cache, model runner, and the process around them.

Knows nothing of HTTP. The leaf modules (`messages`, `codec`, `config` and a few more: ARCHITECTURE.md) need next to nothing,
and are what the other two packages may import; gateway also imports `cores.launch`.
"""
