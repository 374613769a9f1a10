"""``flowpath serve``: starts every program on one host, keeps them up, ends them in order."""
