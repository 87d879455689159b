"""From a trainer's weights to a rollout's on one GPU: how fast an 8B model is quantized and pushed, device to device.

The tensors are those of Llama-3.1-8B in BF16; what is quantized goes into codes and scales that are there, as an engine
holds them, and what is not (norms, embedding, head) is copied. GB/s counts the model's BF16 bytes over the time of the
push itself.

    copy              every tensor as it is: the yardstick, and what a BF16 refit moves
    straight          each weight quantized from the trainer's memory into the engine's
    new, then copy    quantized to a new tensor, and copied: what a loader does that takes whole tensors
    through buffers   cut into pieces in two buffers of 256 MiB, by nemo_fp8.rollout.refit, and quantized from there
    NeMo RL eager     NeMo RL's algorithm in torch, to new tensors, and copied

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
from nemo_fp8.numerics.modelopt import amax_of, four_bits
from nemo_fp8.numerics.nvfp4_tensor import weight_scale_2
from nemo_fp8.numerics.quantize import quantize, quantize_into
from nemo_fp8.rollout.refit import Manifest, fingerprint

from .measuring import Run

BLOCK = 128
WEIGHT = Operand("e4m3", (BLOCK, BLOCK), "fp32")
FOUR_BITS = "8B in NVFP4"
FOUR_BIT_WEIGHT = Precision(rollout="nvfp4").operand("weight", "rollout")
# hidden, ffn, layers, width of k and v, vocabulary
LLAMA_8B = (4096, 14336, 32, 1024, 128256)
TINY = (256, 512, 2, 128, 512)
Tensors = dict[str, torch.Tensor]
Ways = dict[str, Callable[[], None]]
Engine = dict[str, tuple[torch.Tensor, ...]]
"""A tensor's memory in an engine: codes and scales of what is quantized, and one tensor of what is not."""


def measure(run: Run, name: str) -> None:
    """Measure every way in turns; the codes and scales of all are the same."""
    sizes = TINY if run.small else LLAMA_8B
    model = {
        name: torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)
        for name, shape in shapes(*sizes).items()
    }
    four = name == FOUR_BITS
    engine = engine_of(model, held_in_four_bits if four else held_in_blocks)
    target = {name: torch.empty_like(t) for name, t in model.items()}
    pushes = ways_to_four_bits(model, engine) if four else ways_to_blocks(model, engine, run.small)
    run.found = {"bytes": sum(t.numel() * t.itemsize for t in model.values())}
    ways = run.race({"copy": lambda: [target[name].copy_(t) for name, t in model.items()]} | pushes, 40.0, graphs=True)
    held = [t for parts in engine.values() if len(parts) > 1 for t in parts]
    run.found["fingerprints"] = prints = {}
    for way in (way for way in pushes if "error" not in ways[way]):
        for t in held:
            t.zero_()
        pushes[way]()
        prints[way] = fingerprint(*held)


def ways_to_blocks(model: Tensors, engine: Engine, small: bool) -> Ways:
    """Return every push into FP8 in 128x128 blocks with FP32 scales."""
    import transformer_engine.pytorch as te

    buffers = [torch.empty(1 << (18 if small else 28), dtype=torch.uint8, device="cuda") for _ in range(2)]
    te_quantize = te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=False
    )
    return {
        "straight": partial(straight, model, engine),
        "new, then copy": partial(then_copied, model, engine, lambda t: ((q := quantize(t, WEIGHT)).data, q.scale_inv)),
        "through buffers": partial(through_buffers, model, engine, buffers),
        "TransformerEngine": partial(
            then_copied,
            model,
            engine,
            lambda t: ((q := te_quantize(t))._rowwise_data, q._rowwise_scale_inv[:, : -(-t.shape[1] // BLOCK)]),
        ),
        "NeMo RL eager": partial(then_copied, model, engine, padded_eager),
    }


def ways_to_four_bits(model: Tensors, engine: Engine) -> Ways:
    """Return every push into NVFP4 in ModelOpt's layout."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    te_quantize = NVFP4Quantizer(rowwise=True, columnwise=False)

    def ours(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = four_bits(t, FOUR_BIT_WEIGHT, amax_of(t))
        return q.weight, q.weight_scale, q.weight_scale_2

    def theirs(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, (rows, columns) = te_quantize(t), t.shape
        scales = q._rowwise_scale_inv[:rows, : columns // 16].view(torch.float8_e4m3fn)
        return q._rowwise_data, scales, weight_scale_2(q._amax_rowwise).reshape(())

    return {
        "new, then copy": partial(then_copied, model, engine, ours),
        "TransformerEngine": partial(then_copied, model, engine, theirs),
    }


def shapes(hidden: int, ffn: int, layers: int, narrow: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the model by its Hugging Face name."""
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    found = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
    ends = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    return found | ends


def engine_of(model: Tensors, held: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Engine:
    """Allocate the memory of an engine: what ``held`` makes for a weight that it multiplies with, else a tensor of the
    same type."""
    return {name: held(t) if name.endswith("_proj.weight") else (torch.empty_like(t),) for name, t in model.items()}


def held_in_blocks(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales = torch.empty(-(-t.shape[0] // BLOCK), -(-t.shape[1] // BLOCK), device="cuda")
    return torch.empty_like(t, dtype=torch.float8_e4m3fn), scales


def held_in_four_bits(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, columns = t.shape
    return (
        torch.empty(rows, columns // 2, dtype=torch.uint8, device="cuda"),
        torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device="cuda"),
        torch.empty((), device="cuda"),
    )


def straight(model: Tensors, engine: Engine) -> None:
    for name, t in model.items():
        write(t, *engine[name])


def write(t: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Write a tensor, or rows of it, into their place."""
    if scales is None:
        codes.copy_(t)
    else:
        quantize_into(t, WEIGHT, codes, scales)


def then_copied(model: Tensors, engine: Engine, make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    for name, t in model.items():
        codes, *scales = engine[name]
        if not scales:
            codes.copy_(t)
        else:
            new, *new_scales = make(t)
            codes.view(torch.uint8).copy_(new.view(torch.uint8))
            for held, made in zip(scales, new_scales, strict=True):
                held.copy_(made)


def through_buffers(model: Tensors, engine: Engine, buffers: list[torch.Tensor]) -> None:
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
