"""The CUDA device: GpuExecutor's inside when it runs on a GPU. Only this package (and the kernels) imports Triton."""
