"""A Lightning accelerator that lets Megatron train on the CPU: ``nl.Trainer(accelerator=MegatronCPU())``.

Lightning sets the device up before it builds anything and tears it down at the end, also after an error. In between the
names of :mod:`nemo_fp8.train.megatron_cpu` are replaced. With Lightning's own ``accelerator="cpu"`` our plugin does the
same; this class also serves a run with NeMo's own plugin.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from lightning.pytorch.accelerators import CPUAccelerator


class MegatronCPU(CPUAccelerator):
    """The accelerator that runs Megatron and TransformerEngine on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._contexts = ExitStack()
        self._entered = False

    def setup_device(self, device: torch.device) -> None:
        """Let Megatron run on the CPU. Lightning calls this for every stage; only the first call does anything."""
        from nemo_fp8.train.megatron_cpu import megatron_on_cpu

        super().setup_device(device)
        if self._entered:
            return
        self._entered = True
        self._contexts.enter_context(megatron_on_cpu())

    def teardown(self) -> None:
        """Undo what ``setup_device`` did."""
        self._contexts.close()
        self._entered = False
        super().teardown()
