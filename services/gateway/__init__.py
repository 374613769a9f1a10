"""The gateway: OpenAI-compatible HTTP in front, tokens from the cluster behind."""
