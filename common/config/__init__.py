"""Settings: one frozen value, read once at a program's start, and the folders it names."""
