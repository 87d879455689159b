"""Explain a contract in plain words: how each GEMM operand is stored, and what may surprise.

Rows of (heading, sentence), so that the command line can lay them out and ``--json`` can list them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_fp8.contract.operands import GEMMS, Operand

if TYPE_CHECKING:
    from nemo_fp8.contract.precision import Precision

_COMPUTE = {"bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}
_SCALE = {"fp32": "an FP32 scale", "pow2": "a power-of-2 scale", "e8m0": "an E8M0 exponent", "e4m3": "an E4M3 scale"}
_ROLE = {"input": "input", "weight": "weight", "grad": "output gradient"}

# Word in a preset's name -> what it promises.
_PROMISES = {
    "current_scaling": "tensorwise",
    "tensorwise": "tensorwise",
    "subchannel": "blockwise",
    "blockwise": "blockwise",
    "delayed": "delayed",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


def explain(p: Precision) -> str:
    """Return the contract as text, a heading and its sentences to a line."""
    rows = explain_rows(p)
    width = max(len(heading) for heading, _ in rows)
    return "\n".join(f"{heading:<{width}}  {sentence}" for heading, sentence in rows)


def explain_rows(p: Precision) -> list[tuple[str, str]]:
    """Return the contract as (heading, sentence) rows."""
    compute = _COMPUTE[p.compute]
    reduce = "FP32" if p.grad_reduce == "fp32" else compute
    rows = [
        ("precision", p.name),
        (
            "compute",
            f"Layers compute and keep parameters in {compute}; gradients are reduced in {reduce}. Master weights are "
            "FP32.",
        ),
    ]
    rows += [(gemm, _gemm(p, gemm)) for gemm in GEMMS]
    if p.scaling == "nvfp4":
        rows.append(("scales", _two_levels(p)))
    if p.scaling == "delayed":
        rows.append(("scales", _delayed(p)))
    if p.is_quantized:
        rows.append(("weights", _weights(p)))
        rows.append(("attention", _attention(p)))
    if p.is_quantized or p.rolls_out_quantized:
        rows.append(("kept", _kept(p)))
    if p.modules:
        rows.append(("rules", _rules(p)))
    if p.compute == "fp16":
        rows.append(("loss scale", _loss_scale(p)))
    rows.append(("rollout", _rollout(p)))
    return rows + [("note", note) for note in _notes(p)]


def docstring(p: Precision) -> str:
    """Return the docstring of the factory for this contract, as Python and editors show it."""
    rows = "\n".join(f"{heading}: {sentence}" for heading, sentence in explain_rows(p))
    takes = "Takes arguments of NeMo's plugin and fields of the contract; raises PrecisionError if they do not fit."
    return f"Return the precision {p.name!r} as a Config for ``trainer.plugins``.\n\n{rows}\n\n{takes}\n"


def _operand(operand: Operand, role: str, beforehand: str = "found from earlier steps", *, usage: str = "row") -> str:
    if operand.block is None:
        tile = "the whole tensor"
    elif role == "weight" and operand.block[0] > 1:
        tile = "each {}x{} block".format(*operand.block)
    else:
        tile = f"every {operand.block[1]} values along the contracted dimension"
    more = {
        f", {beforehand}": operand.delayed,
        ", rounded by chance": operand.stochastic,
        ", after a random Hadamard transform": operand.hadamard and usage == "col",
        f", the better of two by {(operand.four_over_six or '').upper()}": operand.four_over_six is not None,
    }
    how = "".join(words for words, holds in more.items() if holds)
    return f"{_ROLE[role]} in {operand.format.upper()} with {_SCALE[operand.scale]} for {tile}{how}"


def _gemm(p: Precision, gemm: str) -> str:
    compute = _COMPUTE[p.compute]
    if gemm != "fprop" and p.backward == "dequantized":
        grad, saved = (_ROLE[role] for role in GEMMS[gemm])
        return f"{grad} in {compute}; {saved} decoded to {compute} from the codes that the forward multiplied."
    usage = "col" if gemm == "wgrad" else "row"
    operands = [
        _operand(o, role, usage=usage) for o, role in zip(p.gemms()[gemm], GEMMS[gemm], strict=True) if o is not None
    ]
    if not operands:
        a, b = (_ROLE[role] for role in GEMMS[gemm])
        return f"{a} and {b} in {compute}."
    return "; ".join(operands) + "."


def _two_levels(p: Precision) -> str:
    rows = ", and for each row of an input" if p.row_scaled else ""
    return (
        f"Scales of blocks lie beneath an FP32 scale for each tensor{rows}, with which the largest block has the "
        "largest scale."
    )


def _delayed(p: Precision) -> str:
    source = "the largest" if p.amax_compute_algo == "max" else "the most recent"
    span = "amax of the last step" if p.amax_history_len == 1 else f"of the last {p.amax_history_len} amaxes"
    if p.amax_history_len == 1:
        source = "the"
    margin = f", lowered by a margin of 2**{p.margin}" if p.margin else ""
    return (
        f"A tensor's scale comes from {source} {span}{margin}; amaxes are shared by all ranks of the reduction group."
    )


def _weights(p: Precision) -> str:
    if not p.fp8_param:
        kind = "NVFP4" if p.scaling == "nvfp4" else "FP8"
        return f"Kept in {_COMPUTE[p.compute]} and cast to {kind} once per global batch."
    if p.scaling == "mxfp8":
        return (
            f"Kept in FP8 as primary weights; gathered in {_COMPUTE[p.compute]}, since MX needs a cast for each "
            "direction."
        )
    return "Kept in FP8 as primary weights; the distributed optimizer gathers one byte an element."


def _attention(p: Precision) -> str:
    if not (p.attention or p.multi_head_attention):
        return f"Attention scores and their product with V in {_COMPUTE[p.compute]}."
    return "FP8 dot-product attention" + (
        ", and FP8 between the layers of the attention block." if p.multi_head_attention else "."
    )


def _kept(p: Precision) -> str:
    compute, parts = _COMPUTE[p.compute], []
    if p.first_layers or p.last_layers:
        ends = {"first": p.first_layers, "last": p.last_layers}
        parts.append(" and ".join(f"the {end} {count}" for end, count in ends.items() if count) + " decoder layers")
    if p.keep:
        parts.append("modules named " + ", ".join(p.keep))
    parts.append("embeddings, norms, routers and the output head")
    return f"In {compute}: " + "; ".join(parts) + "."


def _rules(p: Precision) -> str:
    """Return the rules for modules in their order, which decides where two of them match."""
    rules = "; ".join(
        f"{pattern} in {_COMPUTE[recipe]}" if recipe == p.compute else f"{pattern} by {recipe}"
        for pattern, recipe in p.modules
    )
    return f"Of the other modules, by the first rule that matches the name: {rules}."


def _loss_scale(p: Precision) -> str:
    if p.loss_scale is not None:
        return f"Fixed at {p.loss_scale:g}."
    return (
        f"Starts at {p.initial_loss_scale:g}, doubles after {p.loss_scale_window} clean steps, "
        f"halves after {p.hysteresis} overflows, never below {p.min_loss_scale:g}."
    )


def _rollout(p: Precision) -> str:
    cache = "an FP8 KV cache" if p.kv_cache == "fp8" else f"a {_COMPUTE[p.compute]} KV cache"
    if p.rollout == "compute":
        return f"Generation in {_COMPUTE[p.compute]}, with {cache}."
    operands = ((role, p.operand(role, "rollout")) for role in GEMMS["fprop"])
    stored = "; ".join(
        _operand(o, role, "found by calibration") + (", beneath an FP32 scale for each token" if o.row_scaled else "")
        for role, o in operands
        if o is not None
    )
    kernels = " DeepGEMM kernels." if p.deep_gemm else ""
    apart = "" if p.operand("input", "rollout") else f"; inputs in {_COMPUTE[p.compute]}"
    return f"Generation with {stored}{apart}; {cache}.{kernels}"


def _notes(p: Precision) -> list[str]:
    notes = []
    base = p.name.split(" ")[0]
    promised = next((scaling for words, scaling in _PROMISES.items() if words in base), None)
    if promised and promised != p.scaling:
        notes.append(
            f"The name says {promised}, the value is {p.scaling}: NeMo 2.7.3 and Megatron-Bridge ship it so, "
            "and the value is kept for compatibility."
        )
    if p.scaling == "blockwise" and p.format == "hybrid":
        notes.append(
            "Gradients in E5M2, as NeMo ships it; TransformerEngine's own block default and NeMo RL use E4M3 "
            "(format='e4m3')."
        )
    if p.scaling == "mxfp8" and p.fp8_param:
        notes.append("fp8_param saves no bytes on the wire with mxfp8.")
    if p.compute == "fp16" and p.scaling == "delayed" and p.loss_scale is None and p.initial_loss_scale > 65536:
        notes.append(
            "An overflowing loss scale leaves inf in the amax history; the plugin lowers the start to 65536 and "
            "clears what overflowed."
        )
    return notes
