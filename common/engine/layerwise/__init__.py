"""Prefill with the K and V of two layers at a time on the device (DualPath, papers 2.4)."""
