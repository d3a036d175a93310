"""The CUDA driver of granules against a stand-in for ``cuda.bindings.driver``: arguments, and errors by kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

api = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from freetoken.errors import CapacityError, FreeTokenError  # noqa: E402
from freetoken.execution.cuda import vmm  # noqa: E402
from freetoken.execution.cuda.vmm import CudaGranules  # noqa: E402
from freetoken.execution.granules import Granules  # noqa: E402

GRANULE = 2 << 20


class StandIn:
    """The calls, over numbers; types and codes are the real ones. ``codes`` makes a call fail."""

    def __init__(self) -> None:
        self.codes: dict[str, Any] = {}
        self.granularity = GRANULE
        self.supported = 1
        self.reserved: dict[int, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, tuple[int, int]] = {}
        self.allowed: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(api, name)

    def _code(self, name: str) -> Any:
        return self.codes.get(name, api.CUresult.CUDA_SUCCESS)

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> Any:
        assert attribute is api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        return self._code("cuDeviceGetAttribute"), self.supported

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> Any:
        assert properties.location.id == 0
        return self._code("cuMemGetAllocationGranularity"), self.granularity

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        start = 1 << 40 if not self.reserved else max(self.reserved) + (1 << 36)
        self.reserved[start] = size
        return self._code("cuMemAddressReserve"), api.CUdeviceptr(start)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        assert properties.type == api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED and flags == 0
        code = self._code("cuMemCreate")
        if code != api.CUresult.CUDA_SUCCESS:
            return code, None
        self.handles.add(len(self.handles) + 1)
        return code, api.CUmemGenericAllocationHandle(len(self.handles))

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        code = self._code("cuMemMap")
        if code == api.CUresult.CUDA_SUCCESS:
            assert offset == flags == 0 and handle in self.handles and address not in self.mapped
            self.mapped[address] = (size, handle)
        return (code,)

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> Any:
        assert count == len(access) == 1
        assert access[0].flags == api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.allowed |= set(range(address, address + size, GRANULE))
        return (self._code("cuMemSetAccess"),)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        assert self.mapped.pop(address)[0] == size
        return (self._code("cuMemUnmap"),)

    def cuMemRelease(self, handle: int) -> Any:
        self.handles.remove(handle)
        return (self._code("cuMemRelease"),)

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        assert self.reserved.pop(address) == size
        return (self._code("cuMemAddressFree"),)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(CudaGranules, "_ensure_context", lambda self: None)
    return StandIn()


def test_granules_live_and_go(stand_in: StandIn) -> None:
    granules = Granules(CudaGranules(stand_in, 0), GRANULE, 6, {"slots": (4, 6), "kv": (2, 6)})
    assert set(stand_in.mapped) <= stand_in.allowed and len(stand_in.handles) == 6
    granules.prepare({"slots": 2, "kv": 4})
    assert len(stand_in.mapped) == 8
    granules.commit()
    granules.release()
    assert len(stand_in.mapped) == 6 and len({handle for _, handle in stand_in.mapped.values()}) == 6
    stand_in.codes["cuMemMap"] = api.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(FreeTokenError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        granules.prepare({"slots": 3, "kv": 3})
    assert len(stand_in.mapped) == 6
    granules.close()
    assert not stand_in.mapped and not stand_in.handles and not stand_in.reserved


def test_short_memory_names_the_flag(stand_in: StandIn) -> None:
    stand_in.codes["cuMemCreate"] = api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CapacityError, match=r"12.00 MiB .*CUDA_ERROR_OUT_OF_MEMORY.*--vram"):
        Granules(CudaGranules(stand_in, 0), GRANULE, 6, {"slots": (4, 6), "kv": (2, 6)})
    assert not stand_in.reserved


def test_a_device_that_cannot_is_not_used(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.supported = 0
    with pytest.raises(FreeTokenError, match="no virtual memory"):
        CudaGranules(stand_in, 0)
    stand_in.supported, stand_in.granularity = 1, 64 << 20
    with pytest.raises(FreeTokenError, match="67108864 bytes"):
        CudaGranules(stand_in, 0)

    def refuse(api: Any, index: int) -> Any:
        raise FreeTokenError("not today")

    monkeypatch.setattr(vmm, "CudaGranules", refuse)
    assert vmm.open_vmm(torch.device("cuda", 0)) is None
    assert "vmm_missing" in caplog.text and "not today" in caplog.text
