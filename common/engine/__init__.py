"""The engine: computes the tokens of one step, with K and V in the paged pool alone."""
