"""DualPath's scheduling: which engines compute and decode a request, which side reads its KV."""
