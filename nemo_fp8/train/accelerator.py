"""A Lightning accelerator under which Megatron trains on the CPU: ``nl.Trainer(accelerator=MegatronCPU())``.

Lightning sets the device up before it builds anything and tears it down after everything, an error included:
exactly as long as Megatron has to take the CPU for its GPU. FP8 needs no second switch: on a CPU there is
nothing but the emulation, so it is there as well, and no run computes in BF16 what it was told to do in FP8.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from lightning.pytorch.accelerators import CPUAccelerator


class MegatronCPU(CPUAccelerator):
    """The CPU as Megatron's device, FP8 by emulation."""

    def __init__(self) -> None:
        super().__init__()
        self._contexts = ExitStack()
        self._entered = False

    def setup_device(self, device: torch.device) -> None:
        """Enter, once; Lightning calls this again for every stage."""
        from nemo_fp8.train.emulated import emulated_fp8
        from nemo_fp8.train.megatron_cpu import megatron_on_cpu

        super().setup_device(device)
        if self._entered:
            return
        self._entered = True
        self._contexts.enter_context(megatron_on_cpu())
        self._contexts.enter_context(emulated_fp8())

    def teardown(self) -> None:
        """Leave nothing behind."""
        self._contexts.close()
        self._entered = False
        super().teardown()
