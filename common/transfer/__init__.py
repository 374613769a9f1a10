"""Moving KV blocks between pools: one interface, a backend for each kind of link."""
