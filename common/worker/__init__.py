"""The hybrid worker: one engine, one pool, both halves of the handoff; its role is state."""
