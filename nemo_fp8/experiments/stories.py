"""A corpus that needs no download and can be learnt: little stories, generated while they are read.

    Anna has 3 apples. Ben gives her 4 more. Now Anna has 7 apples.

A model learns the letters, then the words, then the sentences, then who has what, then to add: the loss goes on
falling for thousands of steps, which random tokens never let it do. Every sample follows from the seed and its
index alone, so that runs, ranks and resumed runs see the same data. The tokenizer is bytes.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.collections.llm.gpt.data.utils import _reconfigure_limit_batches
from nemo.lightning import io
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, Dataset, default_collate

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
_SPLITS = ("train", "validation", "test")


class ByteTokenizer(TokenizerSpec, io.IOMixin):
    """One token for each byte of UTF-8; the three control bytes that no text holds mark padding, beginning and end."""

    vocab_size = 256
    pad_id, bos_id, eos_id = 0, 1, 2
    unk_id = pad_id
    eod = eos_id

    def text_to_ids(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def ids_to_text(self, ids: list[int]) -> str:
        """The text of some bytes, without control bytes."""
        return bytes(i for i in ids if i not in (self.pad_id, self.bos_id, self.eos_id)).decode(errors="replace")

    def text_to_tokens(self, text: str) -> list[str]:
        """The bytes of a text, each as one character."""
        return [chr(i) for i in self.text_to_ids(text)]

    def tokens_to_text(self, tokens: list[str]) -> str:
        """The text of some tokens."""
        return self.ids_to_text(self.tokens_to_ids(tokens))

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """The byte of each token."""
        return [ord(token) for token in tokens]

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        """The token of each byte."""
        return [chr(i) for i in ids]


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
        self.split, self.samples, self.seq_length, self.seed = _SPLITS.index(split), samples, seq_length, seed
        self.tokenizer = ByteTokenizer()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng((self.seed, self.split, index))
        ids: list[int] = []
        while len(ids) <= self.seq_length:
            ids += [self.tokenizer.bos_id, *self.tokenizer.text_to_ids(story(rng)), self.tokenizer.eos_id]
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


class StoryData(pl.LightningDataModule, io.IOMixin):
    """The stories for NeMo's trainer: Megatron's batches, and a state from which a run resumes."""

    def __init__(
        self,
        seq_length: int = 256,
        micro_batch_size: int = 2,
        global_batch_size: int = 8,
        num_train_samples: int = 1_000_000,
        num_val_samples: int = 1_000,
        num_test_samples: int = 1_000,
        seed: int = 1234,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.seq_length, self.micro_batch_size, self.global_batch_size = seq_length, micro_batch_size, global_batch_size
        self.samples = dict(zip(_SPLITS, (num_train_samples, num_val_samples, num_test_samples), strict=True))
        self.seed, self.num_workers = seed, num_workers
        self.tokenizer = ByteTokenizer()
        self.data_sampler = MegatronDataSampler(seq_length, micro_batch_size, global_batch_size)

    def setup(self, stage: str = "") -> None:
        """Make the three splits, which share no story."""
        self._stories = {split: Stories(split, n, self.seq_length, self.seed) for split, n in self.samples.items()}

    def train_dataloader(self) -> DataLoader[Any]:
        """Return stories to train on, after those that were consumed before."""
        self.data_sampler.init_global_step = self.trainer.global_step
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        """Return stories for validation."""
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """Return stories for the final test."""
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader[Any]:
        stories = self._stories[split]
        loader: DataLoader[Any] = WrappedDataLoader(
            mode=split, dataset=stories, num_workers=self.num_workers, collate_fn=stories.collate_fn
        )
        return loader

    def reconfigure_limit_batches(self) -> None:
        """Convert limits from batches, which Lightning counts, to micro-batches, which NeMo's strategy counts."""
        trainer = self.trainer
        trainer.limit_train_batches = _reconfigure_limit_batches(trainer.limit_train_batches, self._stories["train"])
        trainer.limit_val_batches = _reconfigure_limit_batches(trainer.limit_val_batches, self._stories["validation"])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of consumed samples."""
        steps = self.trainer.global_step - self.data_sampler.init_global_step
        return {"consumed_samples": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that were consumed."""
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        consumed = state["consumed_samples"]
        self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = consumed
        update_num_microbatches(consumed_samples=consumed, consistency_check=False)
        self.data_sampler.if_first_step = 1
