"""One file a family: what its configuration means and how its tensors are named."""
