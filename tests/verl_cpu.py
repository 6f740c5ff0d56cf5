# SPDX-License-Identifier: Apache-2.0
"""verl on a CPU, in every process that has VERL_PLATFORM=cpu and VERL_USE_EXTERNAL_MODULES=verl_cpu."""

from types import SimpleNamespace

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


def nothing(*_: object) -> None:
    pass


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    device_name = "cpu"
    # torch.cuda answers without a GPU too, that no memory is used; these are all it does not answer.
    device_module = SimpleNamespace(
        **vars(torch.cuda)
        | {
            "mem_get_info": lambda: (0, 0),
            "get_device_name": lambda: "CPU",
            "synchronize": nothing,
            "ipc_collect": nothing,
        }
    )

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def set_allocator_settings(self, settings: str) -> None:
        pass
