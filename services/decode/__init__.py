"""The decode worker: a worker that starts in the decode role."""
