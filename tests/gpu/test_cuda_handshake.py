"""Whether host and device see each other's writes, before anything rests on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from freetoken.errors import FreeTokenError  # noqa: E402
from freetoken.execution.cuda.data_plane import DataPlane  # noqa: E402
from freetoken.execution.cuda.handshake import check_handshake  # noqa: E402
from freetoken.execution.cuda.runtime import KERNEL_TIME_S, wait_limit_s  # noqa: E402
from freetoken.testing.cuda_rig import CudaRig, HostDriver  # noqa: E402
from tests.gpu.test_cuda_executor import launch_of  # noqa: E402


def test_a_device_that_answers_passes_and_one_that_does_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CudaRig(launch_of("mixtral", tmp_path, num_slots=2), capture=False) as rig:  # it has passed
        mailbox, plane = rig.mailbox, rig.runtime._plane
        assert mailbox is not None and plane is not None
        for server in rig._servers:
            server.stop()
        with rig.runtime.model.on_stream(), monkeypatch.context() as patch:
            patch.setattr(DataPlane, "publish", lambda self, *arguments: self.seq.add_(1))
            with pytest.raises(FreeTokenError, match=r"the CPU did not see .* within 0.2 s"):
                check_handshake(plane, mailbox, limit_s=0.2)
            plane.seq.sub_(1)
        mailbox.abort()  # the wait ends without the answer
        with rig.runtime.model.on_stream(), pytest.raises(FreeTokenError, match="GPU kernel did not see"):
            check_handshake(plane, mailbox, limit_s=5.0)


def test_a_driver_that_ends_long_kernels_shortens_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from freetoken.execution.cuda import runtime

    class DisplayDriver(HostDriver):
        def limits_kernel_time(self) -> bool:
            return True

    monkeypatch.setattr(runtime, "CudaDriver", DisplayDriver)
    assert wait_limit_s(20.0, DisplayDriver()) == KERNEL_TIME_S
    assert wait_limit_s(0.5, DisplayDriver()) == 0.5
    assert wait_limit_s(20.0, HostDriver()) == 20.0
