"""The operator's command line: ``flowpath``."""
