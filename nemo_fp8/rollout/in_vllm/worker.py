"""What a vLLM worker can be asked from outside: ``llm.collective_rpc("nemo_fp8_...")``.

vLLM mixes this class into its worker (``worker_extension_cls``), whatever the executor; ``engine_args`` names it. All
methods begin with ``nemo_fp8_``, so that none hides one of vLLM's, and return plain values, which every executor can send.
"""

from __future__ import annotations

from typing import Any


class NemoFp8Worker:
    """The methods that this package adds to a worker."""

    model_runner: Any

    def nemo_fp8_layers(self) -> dict[str, str]:
        """How every layer with a method of its own is stored: its name, and the name of the method."""
        model = self.model_runner.model
        return {name: type(layer.quant_method).__name__ for name, layer in model.named_modules() if hasattr(layer, "quant_method")}
