"""Pure policies: they see values and return choices."""
