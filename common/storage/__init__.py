"""The store of computed KV blocks, which outlives the processes that fill it."""
