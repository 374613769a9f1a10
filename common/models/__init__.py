"""Model folders: what a Hugging Face folder says about its model, without loading any weights."""
