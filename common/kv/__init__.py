"""KV memory: layout, the pool's bytes, and who owns each block."""
