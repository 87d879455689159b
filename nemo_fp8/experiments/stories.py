"""The stories of :mod:`nemo_fp8.experiments.corpus` for NeMo's trainer. The tokenizer is bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.collections.llm.gpt.data.utils import _reconfigure_limit_batches
from nemo.lightning import io
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader

from nemo_fp8.experiments.corpus import BEGIN, END, PADDING, SPLITS, VOCABULARY, Stories
from nemo_fp8.moved import renamed

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"story": "nemo_fp8.experiments.corpus.story"})


class ByteTokenizer(TokenizerSpec, io.IOMixin):
    """One token for each byte of UTF-8; the three control bytes that no text holds mark padding, beginning and end."""

    vocab_size = VOCABULARY
    pad_id, bos_id, eos_id = PADDING, BEGIN, END
    unk_id = pad_id
    eod = eos_id

    def text_to_ids(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def ids_to_text(self, ids: list[int]) -> str:
        """Return the text of some bytes, without control bytes."""
        return bytes(i for i in ids if i not in (self.pad_id, self.bos_id, self.eos_id)).decode(errors="replace")

    def text_to_tokens(self, text: str) -> list[str]:
        """Return the bytes of a text, each as one character."""
        return [chr(i) for i in self.text_to_ids(text)]

    def tokens_to_text(self, tokens: list[str]) -> str:
        """Return the text of some tokens."""
        return self.ids_to_text(self.tokens_to_ids(tokens))

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """Return the byte of each token."""
        return [ord(token) for token in tokens]

    def ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Return the token of each byte."""
        return [chr(i) for i in ids]


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
        self.samples = dict(zip(SPLITS, (num_train_samples, num_val_samples, num_test_samples), strict=True))
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
