"""The handoff of one request's KV: one pure state machine per side."""
