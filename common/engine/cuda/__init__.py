"""The engine of a GPU worker: one process, one device, one KV pool in its memory."""
