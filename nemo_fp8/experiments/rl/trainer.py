"""A rank of the training: one Ray actor in the training environment, in the place of a torchrun process.

An actor does one training and ends: Megatron keeps its state in globals, which a second run would find changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_fp8.experiments.rl.settings import GrpoSettings


class TrainerRank:
    """A rank of the training; the driver makes it an actor."""

    def __init__(self, settings: dict[str, Any], rank: int, ranks: int) -> None:
        self.settings, self.rank, self.ranks = GrpoSettings.from_dict(settings), rank, ranks

    def meeting_point(self) -> tuple[str, int]:
        """Listen on a free port of rank 0's machine for as long as this actor lives, and return the address and the
        port, for the ranks to meet at."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        # Listening from here on, as torchrun's agent does: a free port that is only named may be another's by the time
        # that the ranks meet.
        self._met = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._met.port

    def base(self, meeting: tuple[str, int]) -> str:
        """Return the checkpoint of the base model; train it if there is none."""
        from nemo_fp8.experiments.rl.fit import base_checkpoint, fit_base

        self._join(meeting)
        return str(base_checkpoint(self.settings) or fit_base(self.settings))

    def train(self, meeting: tuple[str, int], base: str, engines: Sequence[Any]) -> None:
        """Train the policy to the last step."""
        from nemo_fp8.experiments.rl.fit import fit_policy
        from nemo_fp8.experiments.rl.loop import GrpoLoop

        self._join(meeting)
        fit_policy(self.settings, Path(base), GrpoLoop(self.settings, base, engines))

    def _join(self, meeting: tuple[str, int]) -> None:
        """Set torchrun's environment variables as if each rank had a machine of its own: it sees its GPU only."""
        rank, ranks = str(self.rank), str(self.ranks)
        os.environ |= {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": rank,
        }
        os.environ |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1]), "TORCHELASTIC_RUN_ID": "nemo_fp8"}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
