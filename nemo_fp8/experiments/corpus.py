"""A corpus that needs no download and can be learnt: little stories, generated while they are read.

    Anna has 3 apples. Ben gives her 4 more. Now Anna has 7 apples.

A model learns the letters, then the words, then the sentences, then who has what, then to add: the loss goes on
falling for thousands of steps, which random tokens never let it do. Every sample follows from the seed and its
index alone, so that runs, ranks, resumed runs and stacks see the same data. A token is a byte.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

PADDING, BEGIN, END = range(3)
"""Control bytes that no text holds."""
VOCABULARY = 256
_PEOPLE = {
    "Anna": "her",
    "Ben": "him",
    "Clara": "her",
    "David": "him",
    "Emma": "her",
    "Felix": "him",
    "Grace": "her",
    "Henry": "him",
}
_THINGS = ("apples", "books", "coins", "drums", "eggs", "flags", "gems", "hats")
_PLACES = ("garden", "kitchen", "market", "school", "harbour", "forest")
_ACTS = (
    ("{b} gives {her} {n} more.", 1),
    ("Then {a} finds {n} in the {place}.", 1),
    ("{a} gives {n} to {b}.", -1),
    ("In the {place}, {a} loses {n}.", -1),
)
SPLITS = ("train", "validation", "test")


def story(rng: np.random.Generator) -> str:
    """Generate a story: somebody has some things, gets or loses some up to three times, and the sum is given."""
    a, b = rng.choice(list(_PEOPLE), 2, replace=False)
    thing, have = rng.choice(_THINGS), int(rng.integers(1, 10))
    told = [f"{a} has {have} {thing}."]
    for _ in range(rng.integers(1, 4)):
        sentence, sign = _ACTS[rng.integers(len(_ACTS))]
        n = int(rng.integers(1, 10)) if sign > 0 else int(rng.integers(have + 1))
        have += sign * n
        told.append(sentence.format(a=a, b=b, her=_PEOPLE[a], n=n, place=rng.choice(_PLACES)))
    return " ".join([*told, f"Now {a} has {have} {thing}."])


class Stories(Dataset[dict[str, torch.Tensor]]):
    """Samples of ``seq_length`` tokens, filled with whole stories and cut at the end."""

    def __init__(self, split: str, samples: int, seq_length: int, seed: int) -> None:
        self.split, self.samples, self.seq_length, self.seed = SPLITS.index(split), samples, seq_length, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng((self.seed, self.split, index))
        ids: list[int] = []
        while len(ids) <= self.seq_length:
            ids += [BEGIN, *story(rng).encode(), END]
        tokens = torch.tensor(ids[: self.seq_length + 1])
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": torch.arange(self.seq_length),
        }

    def collate_fn(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Make a batch, with the one causal mask of all samples that Megatron's local attention needs."""
        causal = torch.ones(self.seq_length, self.seq_length, dtype=torch.bool).triu(1)
        batch: dict[str, torch.Tensor] = default_collate(samples)
        return batch | {"attention_mask": causal[None, None]}
