"""The few calls of the CUDA driver that PyTorch does not offer: registering host memory, by ctypes on ``libcuda``.

The driver library comes with the driver and its entry points are stable, so no toolkit is needed. All calls want a
current context on the calling thread, which ``ensure_context`` sees to.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

import torch

from freetoken.errors import FreeTokenError

_PORTABLE, _DEVICE_MAP = 1, 2
_KERNEL_EXEC_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT


class HostMemoryDriver(Protocol):
    """What ``host_memory`` needs of a driver; tests bring their own."""

    def register(self, address: int, size_bytes: int) -> str | None:
        """Pin a range and map it for the device. None, or why not; then nothing has changed."""
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register``; before the range is unmapped."""
        ...

    def device_address(self, address: int) -> int:
        """Where the device sees a registered address."""
        ...


class CudaDriver:
    """``HostMemoryDriver`` of the machine's GPU. Thread-safe."""

    def __init__(self, device_index: int = 0) -> None:
        self._device_index = device_index
        self._lib = _load()

    def ensure_context(self) -> None:
        """Make the device's primary context current on this thread."""
        torch.cuda.set_device(self._device_index)
        torch.cuda.current_stream().query()

    def register(self, address: int, size_bytes: int) -> str | None:
        self.ensure_context()
        code = self._lib.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_uint(_PORTABLE | _DEVICE_MAP)
        )
        return None if code == 0 else self._describe(code)

    def unregister(self, address: int) -> None:
        self.ensure_context()
        code = self._lib.cuMemHostUnregister(ctypes.c_void_p(address))
        if code != 0:
            raise FreeTokenError(f"host memory at {address:#x} cannot be unregistered: {self._describe(code)}")

    def device_address(self, address: int) -> int:
        self.ensure_context()
        pointer = ctypes.c_uint64()
        code = self._lib.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0))
        if code != 0:
            raise FreeTokenError(f"host memory at {address:#x} has no device address: {self._describe(code)}")
        return int(pointer.value)

    def limits_kernel_time(self) -> bool:
        """Whether the driver ends kernels that run for some seconds, as it does where the GPU drives a display."""
        self.ensure_context()
        value, device = ctypes.c_int(0), ctypes.c_int(0)
        code = self._lib.cuCtxGetDevice(ctypes.byref(device))
        if code == 0:
            code = self._lib.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(_KERNEL_EXEC_TIMEOUT), device)
        return code == 0 and value.value != 0

    def copy_to_device(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy from a registered host address to a device address on ``stream`` (its handle). The context
        must be current. Raises ``FreeTokenError`` when the driver refuses."""
        code = self._lib.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(destination), ctypes.c_void_p(source), ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream)
        )
        if code != 0:
            raise FreeTokenError(f"copying {size_bytes} bytes to the device failed: {self._describe(code)}")

    def copy_on_device(self, destination: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueue a copy between device addresses on ``stream`` (its handle). The context must be current. Raises
        ``FreeTokenError`` when the driver refuses."""
        code = self._lib.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream)
        )
        if code != 0:
            raise FreeTokenError(f"copying {size_bytes} bytes on the device failed: {self._describe(code)}")

    def _describe(self, code: int) -> str:
        name = ctypes.c_char_p()
        if self._lib.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name)) == 0 and name.value:
            return name.value.decode()
        return f"CUDA driver error {code}"


@functools.cache
def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FreeTokenError(f"the CUDA driver library libcuda.so.1 cannot be loaded: {error}") from error
