"""From a trainer's weights to a rollout's on one GPU: how fast an 8B model is quantized and pushed, device to device.

The tensors are those of Llama-3.1-8B in BF16; what is quantized goes into codes and scales that are there, as an engine
holds them, and what is not (norms, embedding, head) is copied. GB/s counts the model's BF16 bytes over the time of the
push itself.

    copy              every tensor as it is: the yardstick, and what a BF16 refit moves
    straight          each weight quantized from the trainer's memory into the engine's
    new, then copy    quantized to a new tensor, and copied: what a loader does that takes whole tensors
    through buffers   cut into pieces in two buffers of 256 MiB, by nemo_fp8.rollout.refit, and quantized from there
    NeMo RL eager     NeMo RL's algorithm in torch, to new tensors, and copied
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from nemo_fp8.rollout.refit.stream import cut

from benchmarks.peers import padded_eager
from nemo_fp8.contract import Operand
from nemo_fp8.numerics.quantize import quantize, quantize_into
from nemo_fp8.rollout.refit import Manifest, fingerprint

from .measuring import Run

BLOCK = 128
WEIGHT = Operand("e4m3", (BLOCK, BLOCK), "fp32")
# hidden, ffn, layers, width of k and v, vocabulary
LLAMA_8B = (4096, 14336, 32, 1024, 128256)
TINY = (256, 512, 2, 128, 512)
Tensors = dict[str, torch.Tensor]
Engine = dict[str, tuple[torch.Tensor, torch.Tensor | None]]


def measure(run: Run, name: str) -> None:
    """Every way in turns; the codes and scales of all are the same."""
    import transformer_engine.pytorch as te

    sizes = TINY if run.small else LLAMA_8B
    model = {
        name: torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)
        for name, shape in shapes(*sizes).items()
    }
    engine = engine_of(model)
    buffers = [torch.empty(1 << (18 if run.small else 28), dtype=torch.uint8, device="cuda") for _ in range(2)]
    te_quantize = te.Float8BlockQuantizer(
        te.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=False
    )
    target = {name: torch.empty_like(t) for name, t in model.items()}
    pushes: dict[str, Callable[[], None]] = {
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
    run.found = {"bytes": sum(t.numel() * t.itemsize for t in model.values())}
    ways = run.race({"copy": lambda: [target[name].copy_(t) for name, t in model.items()]} | pushes, 40.0, graphs=True)
    held = [t for pair in engine.values() for t in pair if t is not None]
    run.found["fingerprints"] = prints = {}
    for way in (way for way in pushes if "error" not in ways[way]):
        for t in held:
            t.view(torch.uint8).zero_()
        pushes[way]()
        prints[way] = fingerprint(*held)


def shapes(hidden: int, ffn: int, layers: int, narrow: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name."""
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


def engine_of(model: Tensors) -> Engine:
    """The memory of an engine: codes and scales where it multiplies in FP8, else a tensor of the same type."""
    held: Engine = {}
    for name, t in model.items():
        if name.endswith("_proj.weight"):
            scales = torch.empty(-(-t.shape[0] // BLOCK), -(-t.shape[1] // BLOCK), device="cuda")
            held[name] = torch.empty_like(t, dtype=torch.float8_e4m3fn), scales
        else:
            held[name] = torch.empty_like(t), None
    return held


def straight(model: Tensors, engine: Engine) -> None:
    for name, t in model.items():
        write(t, *engine[name])


def write(t: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None) -> None:
    """A tensor, or rows of it, into their place."""
    if scales is None:
        codes.copy_(t)
    else:
        quantize_into(t, WEIGHT, codes, scales)


def then_copied(
    model: Tensors, engine: Engine, make: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for name, t in model.items():
        codes, scales = engine[name]
        if scales is None:
            codes.copy_(t)
        else:
            new, new_scales = make(t)
            codes.view(torch.uint8).copy_(new.view(torch.uint8))
            scales.copy_(new_scales)


def through_buffers(model: Tensors, engine: Engine, buffers: list[torch.Tensor]) -> None:
    """Both sides of a push: cut into the buffers in turn, and every piece written from there into its rows."""
    manifest, turns, room = Manifest.of(model), itertools.cycle(buffers), [buffers[0]]

    def next_buffer() -> torch.Tensor:
        room[0] = next(turns)
        return room[0]

    names = list(model)
    for pieces, _ in cut(model.items(), manifest, next_buffer):
        for number, row, rows, offset in pieces:
            t, (codes, scales) = model[names[number]], engine[names[number]]
            size = t[:rows].numel() * t.itemsize
            piece = room[0][offset : offset + size].view(t.dtype).view(rows, *t.shape[1:])
            write(
                piece,
                codes[row : row + rows],
                None if scales is None else scales[row // BLOCK : -(-(row + rows) // BLOCK)],
            )
