"""Measurements that can be repeated; ``python -m benchmarks`` runs them all."""
