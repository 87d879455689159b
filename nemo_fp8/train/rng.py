"""Megatron's named random streams, kept as states of the CPU's generator.

Megatron initializes and drops out each shard from a stream of its own: one for the data-parallel ranks, one
for each tensor-parallel rank, one for the experts. On a GPU those are states of the CUDA generator. Here the
simulated device and the host share one generator, so forking a stream saves and restores that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker


class CpuRngStatesTracker(CudaRNGStatesTracker):
    """Megatron's tracker of random streams, over the CPU's generator."""

    def add(self, name: str, seed: int) -> None:
        """A new stream that starts at ``seed``."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"The random stream {name!r} with seed {seed} exists already.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()
        self.seeds_.add(seed)
        self._is_initialized = True

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the stream ``name``, and leave the generator as it was."""
        if name not in self.states_:
            raise ValueError(f"There is no random stream {name!r}; there are {sorted(self.states_)}.")
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()


def get_rng_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """The generator's state, under the signature of Megatron's CUDA function."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Set the generator's state, under the signature of Megatron's CUDA function."""
    torch.set_rng_state(new_state)
