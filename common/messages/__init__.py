"""The catalogue of messages: one file per conversation; ``docs/protocol.md`` is made from it."""
