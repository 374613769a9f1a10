"""One engine of several ranks: each has its heads and its part of the MLP (tensor parallel)."""
