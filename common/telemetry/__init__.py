"""Structured logs: one file of JSON lines per process, and the stories read back from them."""
