"""What GpuExecutor runs: arena, per-request state, batches, the forward pass on a device, sampling."""
