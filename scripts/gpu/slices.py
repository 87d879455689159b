"""What is trained: slices of real models, the precisions, the first weights, the tokens.

A slice has the sizes of a model's layers, fewer of them, and a smaller vocabulary, so that it trains in seconds and its
GEMMs are the real ones. All cases of a shape begin with the same weights and see the same tokens: a walk over a random
graph in which every token has four successors of unequal chances, which a model learns the longer the better.

Layers are ``te`` (TE's fused linears, what NeMo uses) or ``parts``: TE's norms and attention around Megatron's own
linears, which are those that the emulation puts in FP8. BF16 runs in both, so that their distance is known before FP8
is compared.
"""

from __future__ import annotations

import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "scripts" / "gpu"):
    sys.path.insert(0, str(folder))

from common import CONTRACTS  # noqa: E402

from nemo_fp8.contract import Precision  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """A slice of a model: its layers' real sizes, fewer of them, a smaller vocabulary."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    channels: int
    vocabulary: int
    sequence: int
    batch: int
    experts: int = 0
    topk: int = 0

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch

    @property
    def flops(self) -> int:
        """Of a step: six for each weight and token, and causal attention."""
        attention = (
            self.hidden * self.channels * (self.heads + 2 * self.groups) + self.heads * self.channels * self.hidden
        )
        mlp = 3 * self.hidden * self.ffn * max(1, self.topk) + self.hidden * self.experts
        weights = self.layers * (attention + mlp) + self.hidden * self.vocabulary
        return 6 * weights * self.tokens + 6 * self.layers * self.batch * self.sequence**2 * self.heads * self.channels


SHAPES = {
    "llama": Shape(4, 4096, 14336, 32, 8, 128, 32768, 4096, 2),  # Llama-3.1-8B's layers
    "moe": Shape(2, 2048, 768, 32, 4, 128, 32768, 4096, 2, 128, 8),  # Qwen3-30B-A3B's
    "tiny": Shape(2, 128, 256, 4, 2, 32, 512, 64, 2),
    "tiny_moe": Shape(2, 128, 128, 4, 2, 32, 512, 64, 2, 4, 2),
}
MOST_STEPS = 200
CHANCES = torch.tensor([0.5, 0.25, 0.15, 0.1])  # of a token's four successors
BF16 = Precision()


@dataclass(frozen=True)
class Case:
    """A precision, who runs it, in which layers."""

    precision: Precision
    engine: str = "te"
    layers: str = "te"


def _cases() -> dict[str, Case]:
    fp8 = {name: precision for name, precision in CONTRACTS.items() if name != "mxfp8"}
    cases = {"bf16": Case(BF16)} | {name: Case(precision) for name, precision in fp8.items()}
    gathered = ("delayed", "tensorwise", "blockwise pow2")
    cases |= {f"{name}, FP8 weights": Case(fp8[name].replace(fp8_param=True)) for name in gathered}
    cases["bf16 in parts"] = Case(BF16, "te", "parts")
    return cases | {f"{name}, emulated": Case(precision, "emulated", "parts") for name, precision in fp8.items()}


CASES = _cases()


def canonical(name: str) -> str:
    """One name for one weight, whether its experts are grouped or a list."""
    return re.sub(r"local_experts\.(\d+)\.linear_fc(\d)\.weight", r"linear_fc\2.weight\1", name)


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """The same weights in every case, from the name of each; an FP8 weight keeps them for its master weight too."""
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        random = torch.Generator(weight.device).manual_seed(zlib.crc32(canonical(name).encode()))
        value = torch.randn(weight.shape, generator=random, device=weight.device).mul_(0.02).to(torch.bfloat16)
        weight.copy_(value)
        if hasattr(weight, "_high_precision_init_val"):  # TransformerEngine's
            weight._high_precision_init_val = value.cpu()


def tokens(shape: Shape, steps: int) -> torch.Tensor:
    """Tokens of every step, [steps, batch, sequence + 1]; the first steps are the same for whoever takes fewer."""
    if steps > MOST_STEPS:
        raise ValueError(f"tokens are made for {MOST_STEPS} steps")
    random = torch.Generator().manual_seed(7)
    alphabet, walkers = min(4096, shape.vocabulary), MOST_STEPS * shape.batch
    successors = torch.randint(alphabet, (alphabet, 4), generator=random)
    walk = torch.randint(alphabet, (shape.sequence + 1, walkers), generator=random)
    for here in range(shape.sequence):
        chosen = torch.multinomial(CHANCES, walkers, replacement=True, generator=random)
        walk[here + 1] = successors[walk[here], chosen]
    return walk.t().reshape(MOST_STEPS, shape.batch, -1)[:steps].contiguous()
