"""From a trainer's weights to a rollout's on one GPU: how fast an 8B model is quantized and pushed, device to device.

The tensors are those of Llama-3.1-8B in BF16; what is quantized goes into codes and scales that are there, as an engine
holds them, and what is not (norms, embedding, head) is copied. GB/s counts the model's BF16 bytes over the time of the
push itself.

    copy              every tensor as it is: the yardstick, and what a BF16 refit moves
    new, then copy    quantized to a new tensor, and copied: what a loader does that takes whole tensors
    NeMo RL eager     NeMo RL's algorithm in torch, to new tensors, and copied
    straight          each weight quantized from the trainer's memory into the engine's
    through buffers   cut into pieces in two buffers of 256 MiB, by nemo_fp8.rollout.refit, and quantized from there

``8B`` goes into FP8 blocks of 128x128; ``8B in NVFP4`` into ModelOpt's layout, each matrix beneath an amax of its own,
by new tensors that are copied, as our push and TransformerEngine's quantizer do it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from nemo_fp8.rollout.refit.stream import cut

from benchmarks.peers import padded_eager
from nemo_fp8.contract import Operand, Precision
from nemo_fp8.models.shapes import Model
from nemo_fp8.numerics.modelopt import amax_of, four_bits
from nemo_fp8.numerics.nvfp4_tensor import weight_scale_2
from nemo_fp8.numerics.quantize import quantize, quantize_into
from nemo_fp8.rollout.refit import Manifest, fingerprint

from .measuring import Run, te_quantizer

BLOCK = 128
WEIGHT = Operand("e4m3", (BLOCK, BLOCK), "fp32")
FOUR_BIT_WEIGHT = Precision(rollout="nvfp4").operand("weight", "rollout")
_LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B = _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
TINY = _LLAMA | {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
Tensors = dict[str, torch.Tensor]
Parts = tuple[torch.Tensor, ...]
"""What an engine holds of a tensor: codes and scales of what is quantized, and one tensor of what is not."""


def measure(run: Run, name: str) -> None:
    """Measure every way in turns; the codes and scales of all are the same."""
    model = {
        name: torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)
        for name, shape in shapes(Model.read(TINY if run.small else LLAMA_8B)).items()
    }
    copied = {name: (torch.empty_like(t),) for name, t in model.items()}
    makes = MAKES[name]
    ours = makes["new, then copy"]
    # What an engine multiplies with is quantized.
    engine = copied | {name: ours(t) for name, t in model.items() if name.endswith("_proj.weight")}
    pushes = {way: partial(push, model, engine, partial(then_copied, make)) for way, make in makes.items()}
    if ours is in_blocks:
        buffers = [torch.empty(1 << (18 if run.small else 28), dtype=torch.uint8, device="cuda") for _ in range(2)]
        pushes["straight"] = partial(push, model, engine, write)
        pushes["through buffers"] = partial(through_buffers, model, engine, buffers)
    run.found = {"bytes": sum(t.numel() * t.itemsize for t in model.values())}
    ways = run.race({"copy": partial(push, model, copied, write)} | pushes, 40.0, graphs=True)
    held = [t for parts in engine.values() if len(parts) > 1 for t in parts]
    run.found["fingerprints"] = prints = {}
    for way in (way for way in pushes if "error" not in ways[way]):
        for t in held:
            t.zero_()
        pushes[way]()
        prints[way] = fingerprint(*held)


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the model by its Hugging Face name."""
    ends = {"model.embed_tokens": (model.vocab, model.hidden), "lm_head": (model.vocab, model.hidden)}
    norms = [f"layers.{n}.{at}_layernorm" for n in range(model.layers) for at in ("input", "post_attention")]
    found = ends | {f"model.{name}": (model.hidden,) for name in ("norm", *norms)}
    for layer, linear in model.all_linears():
        for name, rows in zip(linear.hugging_face, linear.parts, strict=True):
            found[f"model.layers.{layer}.{name}"] = (rows, linear.columns)
    return {f"{name}.weight": shape for name, shape in found.items()}


def in_blocks(t: torch.Tensor) -> Parts:
    q = quantize(t, WEIGHT)
    return q.data, q.scale_inv


def te_in_blocks(t: torch.Tensor) -> Parts:
    q = te_quantizer(WEIGHT)(t)
    return q._rowwise_data, q._rowwise_scale_inv[:, : -(-t.shape[1] // BLOCK)]


def in_four_bits(t: torch.Tensor) -> Parts:
    q = four_bits(t, FOUR_BIT_WEIGHT, amax_of(t))
    return q.weight, q.weight_scale, q.weight_scale_2


def te_in_four_bits(t: torch.Tensor) -> Parts:
    q, (rows, columns) = te_quantizer(FOUR_BIT_WEIGHT)(t), t.shape
    scales = q._rowwise_scale_inv[:rows, : columns // 16].view(torch.float8_e4m3fn)
    return q._rowwise_data, scales, weight_scale_2(q._amax_rowwise).reshape(())


MAKES: dict[str, dict[str, Callable[[torch.Tensor], Parts]]] = {
    "8B": {"new, then copy": in_blocks, "TransformerEngine": te_in_blocks, "NeMo RL eager": padded_eager},
    "8B in NVFP4": {"new, then copy": in_four_bits, "TransformerEngine": te_in_four_bits},
}


def push(model: Tensors, engine: dict[str, Parts], put: Callable[..., None]) -> None:
    """Put every tensor that is quantized into its place, and copy the others."""
    for name, t in model.items():
        (put if len(engine[name]) > 1 else write)(t, *engine[name])


def write(t: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Write a tensor, or rows of it, into their place."""
    if scales is None:
        codes.copy_(t)
    else:
        quantize_into(t, WEIGHT, codes, scales)


def then_copied(make: Callable[[torch.Tensor], Parts], t: torch.Tensor, *parts: torch.Tensor) -> None:
    for held, made in zip(parts, make(t), strict=True):
        held.view(made.dtype).copy_(made)


def through_buffers(model: Tensors, engine: dict[str, Parts], buffers: list[torch.Tensor]) -> None:
    """Run both sides of a push: cut into the buffers in turn, and every piece written from there into its rows."""
    manifest, turns, room = Manifest.of(model), itertools.cycle(buffers), [buffers[0]]

    def next_buffer() -> torch.Tensor:
        room[0] = next(turns)
        return room[0]

    names = list(model)
    for pieces, _ in cut(model.items(), manifest, next_buffer):
        for number, row, rows, offset in pieces:
            t, (codes, *scales) = model[names[number]], engine[names[number]]
            size = t[:rows].numel() * t.itemsize
            piece = room[0][offset : offset + size].view(t.dtype).view(rows, *t.shape[1:])
            write(piece, codes[row : row + rows], *(s[row // BLOCK : -(-(row + rows) // BLOCK)] for s in scales))
