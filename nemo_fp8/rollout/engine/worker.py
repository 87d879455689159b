"""The methods of a vLLM worker that can be called from outside: ``llm.collective_rpc("nemo_fp8_...")``.

vLLM mixes this class into its worker under every executor; ``engine_args`` names it (``worker_extension_cls``). All
methods begin with ``nemo_fp8_``, so that none hides one of vLLM's, and return plain values, which every executor can
send.
"""

from __future__ import annotations

from typing import Any

from nemo_fp8.extras import require

__needs__ = require("rollout")

from nemo_fp8.rollout.engine import kv
from nemo_fp8.rollout.engine.report import plain_report
from nemo_fp8.rollout.refit.worker.held import NemoFp8Held


class NemoFp8Worker(NemoFp8Held):
    """Everything that this package adds to a worker. The methods of a push are inherited from ``refit.worker``."""

    model_runner: Any

    @property
    def weight_transfer_engine(self) -> Any:
        """vLLM's weight-transfer engine of this worker; ours then pushes by this worker's methods, as all others do."""
        return self.__dict__.get("weight_transfer_engine")

    @weight_transfer_engine.setter
    def weight_transfer_engine(self, engine: Any) -> None:
        self.__dict__["weight_transfer_engine"] = engine
        if hasattr(engine, "pushes"):
            engine.pushes = self

    def nemo_fp8_report(self) -> dict[str, dict[str, Any]]:
        """Return how every layer is stored, and why: see :class:`nemo_fp8.rollout.engine.report.LayerReport`."""
        return plain_report(self.model_runner.get_model())

    # ------------------------------------------------------------------ the KV cache

    def nemo_fp8_listen_to_kv(self) -> None:
        """Begin to count the magnitudes of keys and values."""
        self.nemo_fp8_stop_listening()
        self.nemo_fp8_kv_listener = kv.KvListener(self.model_runner.get_model())

    def nemo_fp8_stop_listening(self) -> dict[str, list[dict[int, int]]]:
        """Stop counting; return the counts of every attention layer."""
        listener = self.__dict__.pop("nemo_fp8_kv_listener", None)
        return {} if listener is None else listener.stop()

    def nemo_fp8_kv_scales(self) -> dict[str, float]:
        """Return the scales of the KV cache, by the names under which a push sets them."""
        return kv.scales_of(self.model_runner.get_model())

    def nemo_fp8_set_kv_scales(self, scales: dict[str, float]) -> None:
        """Set scales of the KV cache."""
        kv.set_scales(self.model_runner.get_model(), scales)
