"""The local scheduler of a worker: what the next engine step computes. Pure."""
