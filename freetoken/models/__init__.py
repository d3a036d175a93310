"""Model families: what a checkpoint's configuration means, and the forward pass that follows from it."""
