"""The programs of FlowPath, one folder each; they never import each other."""
