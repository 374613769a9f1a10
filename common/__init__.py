"""What two programs share: messages, transport, KV memory, scheduling, engine, workers."""
