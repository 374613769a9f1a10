"""The prefill worker: a worker that starts in the prefill role, or as a combined one."""
