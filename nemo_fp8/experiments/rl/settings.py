"""All settings of a GRPO run: one frozen description, which every process of the run gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError, Problem


@dataclass(frozen=True, kw_only=True)
class PolicySize:
    """A Llama. Its sizes are multiples of 128, on one rank and on two, so trainer and rollout cut the same blocks."""

    layers: int = 4
    hidden: int = 128
    ffn: int = 512
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 128
    vocab: int = 256
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def hugging_face(self, positions: int) -> dict[str, Any]:
        """Return the model's ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_base,
            "max_position_embeddings": positions,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """A run. The contract says what trains and what generates in FP8; all else is equal for all contracts.

    Raises PrecisionError with every contradiction between the settings.
    """

    folder: str
    """The folder of checkpoints and record. A run that finds its own there continues from them."""
    base: str
    """The folder of the base model, which is trained first if there is none. Compared runs share it."""
    precision: Precision = field(default_factory=lambda: preset("bf16_with_fp8_blockwise_mixed"))
    seed: int = 1234

    digits: int = 8
    policy: PolicySize = field(default_factory=PolicySize)

    base_steps: int = 200
    """Steps on demonstrations that make the base model."""
    base_batch: int = 64
    base_lr: float = 2e-3

    steps: int = 100
    problems: int = 32
    """Problems in a step."""
    answers: int = 8
    """Answers sampled for each problem."""
    temperature: float = 1.0
    lr: float = 1e-4
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.005
    loss_fn: dict[str, Any] | None = None
    """NeMo RL's keys on importance sampling. None: truncated at 2 if the contract has a correction or answers
    are one step old."""
    one_step_off: bool = False
    """Generate the next step's answers while this step trains: their weights are one step old."""

    delta: bool = False
    """Push what changed since the step before, as differences of codes and scales, instead of all weights."""

    validation: int = 1024
    """Held-out problems, answered greedily."""
    validate_every: int = 10
    save_every: int = 1
    gate_samples: int = 32
    """Samples of each step that the mismatch gate checks; 0 switches it off."""
    gate_stops: bool = True
    """If the gate fires, end the run before it trains on the samples; else only record it."""

    ranks: int = 1
    tensor_parallel: int = 1
    micro_batch: int = 128
    engines: int = 1
    rank_resources: dict[str, float] | None = None
    """Ray's resources for each rank: ``{"GPU": 0.5}``, or a label of some machines. None: a share of the GPUs."""
    engine_resources: dict[str, float] | None = None
    """Ray's resources for each engine, as for each rank."""

    def __post_init__(self) -> None:
        problems = list(_contradictions(self))
        if problems:
            raise PrecisionError(problems)

    @property
    def samples(self) -> int:
        """The samples in a step: Megatron's global batch."""
        return self.problems * self.answers

    @property
    def seq_length(self) -> int:
        """The tokens of a sample without the last one: problem, answer and marks, rounded up to 16 for FP8."""
        return -(-(2 * self.digits + 2) // 16) * 16

    @property
    def correction(self) -> dict[str, Any]:
        """The importance sampling of the run, under NeMo RL's keys."""
        if self.loss_fn is not None:
            return self.loss_fn
        if not (self.precision.importance_sampling or self.one_step_off):
            return {"use_importance_sampling_correction": False}
        return {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
        }

    @property
    def record(self) -> Path:
        """The file with the record of steps."""
        return Path(self.folder, "steps.jsonl")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; ``from_dict`` makes equal settings of them."""
        return asdict(self) | {"precision": self.precision.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GrpoSettings:
        """Make settings from plain values."""
        return cls(
            **values | {"precision": Precision.from_dict(values["precision"]), "policy": PolicySize(**values["policy"])}
        )


def _contradictions(s: GrpoSettings) -> Iterator[Problem]:
    data_parallel = s.ranks // s.tensor_parallel
    if s.ranks != data_parallel * s.tensor_parallel:
        yield Problem(
            f"ranks={s.ranks} with tensor_parallel={s.tensor_parallel}.",
            "A model split over so many ranks fills them all.",
            "Choose ranks as a multiple of tensor_parallel.",
        )
    elif s.samples % (s.micro_batch * data_parallel):
        yield Problem(
            f"{s.problems} problems x {s.answers} answers with micro_batch={s.micro_batch} on {data_parallel} "
            "data-parallel ranks.",
            "Megatron's global batch is a whole number of micro-batches on each rank.",
            f"Choose micro_batch so that it divides {s.samples // data_parallel}.",
        )
    if s.problems % s.engines:
        yield Problem(
            f"{s.problems} problems on {s.engines} engines.",
            "Each engine answers as many.",
            "Choose problems as a multiple of engines.",
        )
