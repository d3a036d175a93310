"""CUDA's virtual memory management, through ``cuda.bindings``: physical granules mapped at reserved addresses."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from freetoken.elastic.arena_shape import CUDA_ALIGNMENT_BYTES
from freetoken.errors import CapacityError, FreeTokenError

logger = logging.getLogger(__name__)


def open_vmm(device: torch.device) -> CudaGranules | None:
    """The driver for ``device``; None, with a line in the log that says why, where there is none."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        logger.warning("event=vmm_missing detail='no package cuda-bindings (%s)'", error)
        return None
    try:
        return CudaGranules(driver, device.index or 0)
    except (FreeTokenError, RuntimeError) as error:  # RuntimeError: the bindings do not find the driver's library
        logger.warning("event=vmm_missing detail=%r", str(error))
        return None


class CudaGranules:
    """``GranuleDriver`` of a GPU. Ranges are device addresses, granules allocation handles. Any thread."""

    def __init__(self, api: Any, device_index: int) -> None:
        """``api`` is ``cuda.bindings.driver``. Raises ``FreeTokenError`` when the device cannot do it."""
        self._api = api
        self._index = device_index
        self._ensure_context()
        attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", attribute, device_index):
            raise FreeTokenError("the GPU or its driver has no virtual memory management")
        self._properties = api.CUmemAllocationProp()
        self._properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device_index
        self._access = api.CUmemAccessDesc()
        self._access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device_index
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.alignment_bytes = int(self._call("cuMemGetAllocationGranularity", self._properties, least))
        if CUDA_ALIGNMENT_BYTES % self.alignment_bytes:
            raise FreeTokenError(f"the GPU maps memory in pieces of {self.alignment_bytes} bytes only")

    def _ensure_context(self) -> None:
        torch.cuda.set_device(self._index)
        torch.cuda.current_stream().query()  # makes the primary context current on this thread

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *results = getattr(self._api, name)(*arguments)
        if code != self._api.CUresult.CUDA_SUCCESS:
            text = getattr(code, "name", str(code))
            if code == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise CapacityError(f"{name}: {text}")
            raise FreeTokenError(f"{name}: {text}")
        return results[0] if results else None

    def reserve(self, name: str, size_bytes: int) -> int:
        self._ensure_context()
        return int(self._call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def create(self, size_bytes: int) -> int:
        self._ensure_context()
        return int(self._call("cuMemCreate", size_bytes, self._properties, 0))

    def map(self, where: int, offset: int, size_bytes: int, granule: int) -> None:
        self._ensure_context()
        self._call("cuMemMap", where + offset, size_bytes, 0, granule, 0)

    def allow(self, where: int, offset: int, size_bytes: int) -> None:
        self._ensure_context()
        self._call("cuMemSetAccess", where + offset, size_bytes, [self._access], 1)

    def unmap(self, where: int, offset: int, size_bytes: int) -> None:
        self._ensure_context()
        self._call("cuMemUnmap", where + offset, size_bytes)

    def destroy(self, granule: int, size_bytes: int) -> None:
        self._ensure_context()
        self._call("cuMemRelease", granule)

    def free(self, where: int, size_bytes: int) -> None:
        self._ensure_context()
        self._call("cuMemAddressFree", where, size_bytes)


class _DeviceBytes:
    """A range of device addresses as PyTorch can take it over (the array interface of CUDA)."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def tensor_over(where: Any, size_bytes: int, device: torch.device) -> Tensor:
    """uint8 [size_bytes] over a driver's range, of which only the beginning may be mapped; owns nothing. On the CPU
    device ``where`` is a shared segment."""
    if device.type == "cuda":
        return torch.as_tensor(_DeviceBytes(where, size_bytes), device=device)
    return torch.frombuffer(memoryview(where), dtype=torch.uint8, count=size_bytes)
