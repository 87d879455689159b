"""The words of every finding, in one table: those of doctor, lint, ``check``, the gate and the plugin's checks.

A row of ``RULES`` is a :class:`nemo_fp8.errors.Problem` with ``{gaps}``: a code to search for, a severity, and three
sentences. Code that finds something decides only *that* a row applies, and fills in the gaps. ``docs/lint.md`` is
written from the table, so it lists every finding. Words that only one place can raise, and no report lists, stay there.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_fp8.errors import SEVERITIES, Problem
from nemo_fp8.moved import renamed

if not TYPE_CHECKING:  # see nemo_fp8.moved
    __getattr__ = renamed(__name__, {"Finding": "nemo_fp8.errors.Problem", "Rule": "nemo_fp8.errors.Problem"})


def finding(code: str, where: str = "", /, severity: str | None = None, **gaps: Any) -> Problem:
    """Return the finding of a code about ``where``, its gaps filled in; ``severity`` replaces the rule's."""
    rule = RULES[code]
    what, why, remedy = (text.format(**gaps) for text in (rule.what, rule.why, rule.remedy))
    return replace(rule, what=what, why=why, remedy=remedy, severity=severity or rule.severity, code=code, where=where)


def gaps(code: str) -> set[str]:
    """Return the names of a rule's gaps."""
    rule = RULES[code]
    return {
        name for text in (rule.what, rule.why, rule.remedy) for _, name, _, _ in string.Formatter().parse(text) if name
    }


def worst(findings: Iterable[Problem]) -> str | None:
    """Return the most severe severity among findings; None if there are none."""
    return min((f.severity for f in findings), key=SEVERITIES.index, default=None)


def sort(findings: Iterable[Problem]) -> list[Problem]:
    """Sort findings: errors first, then in the order of the rules."""
    order = {code: i for i, code in enumerate(RULES)}
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), order[f.code]))


MEGATRON_CORE = "Install megatron-core==0.15.3 (constraints/training.txt)."

error, warning, info = (partial(Problem, severity=severity) for severity in SEVERITIES)

RULES: dict[str, Problem] = {
    # ------------------------------------------------------------ the contract
    "contract": error("{what}", "{why}", "{remedy}"),
    "contract-format-without-scaling": error(
        "format={format!r} with scaling={scaling!r}.",
        "FP8 needs an element type and a way to find its scales; without FP8 there is neither.",
        "Set both (format='hybrid', scaling='blockwise'), or leave both out.",
    ),
    "contract-e2m1": error(
        "format={format!r} with scaling={scaling!r}.",
        "E2M1 elements have NVFP4's two levels of scales, and no other element has them.",
        "Set format='e2m1' and scaling='nvfp4', or format='hybrid' and an FP8 scaling.",
    ),
    "contract-nvfp4-compute": error(
        "scaling='nvfp4' with compute={compute!r}.",
        "TransformerEngine's NVFP4 casts take BF16 values (its Hadamard transform takes no others).",
        "Set compute='bf16'.",
    ),
    "contract-nvfp4-param": error(
        "fp8_param=True with scaling='nvfp4'.",
        "Neither NeMo 2.7.3 nor Megatron-Bridge 0.3.1 has a setting for primary weights in FP4.",
        "Set fp8_param=False: weights stay in BF16 and are cast for each global batch.",
    ),
    "contract-nvfp4-wgrad": error(
        "wgrad=False with scaling='nvfp4'.",
        "TransformerEngine has no NVFP4 recipe whose weight gradient alone stays in the compute dtype.",
        "Set wgrad=True, or backward='high_precision'.",
    ),
    "contract-four-over-six": error(
        "four_over_six={four_over_six!r} with hadamard=True.",
        "TransformerEngine has no kernel that chooses between two scales and transforms.",
        "Set hadamard=False, or four_over_six='weights'.",
    ),
    "contract-backward-delayed": error(
        "backward={backward!r}, backward_scaling={backward_scaling!r} with delayed scaling.",
        "TransformerEngine refuses to override the backward of delayed scaling, whose scales come from it.",
        "Set scaling='tensorwise', or backward='quantized' and backward_scaling=None.",
    ),
    "contract-backward-unquantized": error(
        "backward={backward!r}, backward_scaling={backward_scaling!r} without a format.",
        "Nothing is quantized in the forward, so there is nothing that the backward could do otherwise.",
        "Set format and scaling, or leave both out.",
    ),
    "contract-backward-twice": error(
        "backward={backward!r} with backward_scaling={backward_scaling!r}.",
        "A backward in the compute dtype quantizes nothing.",
        "Set backward='quantized', or leave backward_scaling out.",
    ),
    "contract-modules-unquantized": error(
        "modules without a format.",
        "The rules take modules out of the contract's recipe, or give them another one, and there is none: Megatron "
        "applies rules only where a layer is quantized already.",
        "Set format and scaling to those of most modules.",
    ),
    "contract-modules-delayed": error(
        "modules with delayed scaling.",
        "Megatron reduces the amaxes of delayed scaling for all layers at once.",
        "Set scaling='tensorwise', or leave modules out.",
    ),
    "contract-rollout-block": error(
        "rollout={rollout!r} with rollout_block={rollout_block!r}.",
        "NVFP4 has a scale for 16 values in a row, and nothing else has.",
        "Set rollout='nvfp4' and rollout_block='1x16', or another of both.",
    ),
    "contract-static-nvfp4": error(
        "activation_scheme='static' with rollout='nvfp4'.",
        "Rollouts find the FP32 scale of NVFP4 activations for each token.",
        "Set activation_scheme='dynamic', or 'none' for activations in the compute dtype.",
    ),
    "contract-activations-none": error(
        "activation_scheme='none' with rollout={rollout!r}.",
        "FP8 rollouts choose by the machine whether activations are quantized; only NVFP4's checkpoints say it.",
        "Set activation_scheme='dynamic'; a machine without FP8 units leaves activations as they are.",
    ),
    "contract-param-without-fp8": error(
        "fp8_param=True without FP8.",
        "Primary weights are kept in the format of the FP8 GEMMs, and this contract has none.",
        "Set format and scaling, or fp8_param=False.",
    ),
    "contract-param-fp32": error(
        "fp8_param=True with compute='fp32'.",
        "Megatron's distributed optimizer keeps FP8 weights only beside BF16 or FP16 parameters.",
        "Set compute='bf16', or fp8_param=False.",
    ),
    "contract-attention-without-fp8": error(
        "FP8 attention without FP8.",
        "Attention takes its scales from the FP8 recipe, and this contract has none.",
        "Set format and scaling, or attention=False and multi_head_attention=False.",
    ),
    "contract-attention-blockwise": error(
        "FP8 attention with blockwise scaling.",
        "TransformerEngine's Float8BlockScaling refuses fp8_dpa and fp8_mha.",
        "Set attention=False and multi_head_attention=False, or scaling='tensorwise'.",
    ),
    "contract-layers-delayed": error(
        "first_layers={first_layers}, last_layers={last_layers} with delayed scaling.",
        "Megatron cannot leave single layers out of delayed scaling, whose amaxes are reduced for all layers at once.",
        "Set scaling='tensorwise' or 'blockwise', or first_layers=0 and last_layers=0.",
    ),
    "contract-mxfp8-scales": error(
        "FP32 scales with mxfp8.",
        "An MX scale is one E8M0 exponent byte: a power of two by definition.",
        "Set weight_scale='pow2' and activation_scale='pow2', or scaling='blockwise'.",
    ),
    "contract-delayed-scales": error(
        "Power-of-2 scales with delayed scaling.",
        "TransformerEngine's delayed scaling knows FP32 scales only, and there is no FP8 rollout that they could be "
        "meant for.",
        "Set weight_scale='fp32' and activation_scale='fp32', or scaling='tensorwise'.",
    ),
    "contract-mx-rollout-scales": error(
        "FP32 scales with rollout_block='1x32'.",
        "1x32 is the MX block, whose scale is one E8M0 exponent byte.",
        "Set weight_scale='pow2' and activation_scale='pow2', or rollout_block='128x128'.",
    ),
    "contract-static-blocks": error(
        "activation_scheme='static' with rollout_block={rollout_block!r}.",
        "vLLM scales activations of block-quantized layers for each token; calibrated scales go with one scale a "
        "tensor.",
        "Set activation_scheme='dynamic', or rollout_block='tensor'.",
    ),
    "contract-deep-gemm": error(
        "deep_gemm=True without an FP8 rollout in 128x128 blocks.",
        "DeepGEMM holds kernels for FP8 with 128x128 weight blocks only.",
        "Set rollout='fp8' and rollout_block='128x128', or deep_gemm=False.",
    ),
    "contract-loss-scale": error(
        "initial_loss_scale={initial_loss_scale} is below min_loss_scale={min_loss_scale}.",
        "Dynamic loss scaling would start under its own floor.",
        "Raise initial_loss_scale, or lower min_loss_scale.",
    ),
    "unsupported": error("{recipe} cannot run on {machine}.", "{why}", "{remedy}"),
    "emulated": warning("{recipe} runs without FP8 GEMMs on {machine}.", "{why}", "{remedy}"),
    "unknown-support": info("{recipe} on {machine}: whether it runs is not known.", "{why}", "{remedy}"),
    "refused": error("{precision} ({recipe}) cannot run in FP8 on {machine}.", "{why}", "{remedy}"),
    "no-torch": error("The emulation has no torch.", "It runs on torch.", "pip install 'nemo-fp8[train]'."),
    "ignored-delayed": warning(
        "{field}={value!r} does nothing with {scaling}.",
        "Only delayed scaling has a history of amaxes and a margin; the other recipes scale from the tensor itself.",
        "Leave {field} out, or set scaling='delayed'.",
    ),
    "ignored-loss-scale": warning(
        "{field}={value!r} does nothing with compute={compute!r}.",
        "Only FP16 needs its loss scaled: BF16 and FP32 have the same exponent range.",
        "Leave {field} out, or set compute='fp16'.",
    ),
    "ignored-dynamic-loss-scale": warning(
        "{field}={value!r} does nothing with loss_scale={loss_scale!r}.",
        "Only a dynamic loss scale begins, ends and moves.",
        "Leave {field} out, or set loss_scale=None.",
    ),
    "ignored-setting": warning(
        "{field}={value!r} does nothing in this contract.",
        "Training and rollout store every operand as they would without it.",
        "Leave {field} out, or set what it is about: `nemo_fp8.Precision` describes each field.",
    ),
    "ignored-rollout": warning(
        "{field}={value!r} does nothing with rollout='compute'.",
        "Generation runs in the compute dtype, which has no blocks, scales or FP8 kernels.",
        "Leave {field} out, or set rollout='fp8'.",
    ),
    "ignored-scales": warning(
        "{field}='pow2' holds in rollout only: training with delayed scaling goes on with FP32 scales.",
        "TransformerEngine's delayed scaling knows FP32 scales alone, so trainer and rollout hold different copies of "
        "the weights.",
        "Set scaling='tensorwise' or 'blockwise', or {field}='fp32'.",
    ),
    "ignored-scales-without-fp8": warning(
        "{field}={value!r} does nothing: neither training nor rollout is in FP8.",
        "A scale belongs to an FP8 tensor, and this contract has none.",
        "Leave {field} out, or set format and scaling.",
    ),
    "ignored-layers": warning(
        "{kept} keep nothing: neither training nor rollout is in FP8.",
        "Every layer is in the compute dtype as it is.",
        "Leave them out, or set format and scaling.",
    ),
    "ignored-wgrad": warning(
        "wgrad=False (fp8_wgrad=False) on TransformerEngine 2.0 and newer does nothing: the weight gradient runs in "
        "FP8.",
        "Megatron hands it over for delayed scaling alone, and TE has not read it since 2.0.",
        "Set wgrad=True (fp8_wgrad=True): nemo_fp8's plugin refuses the other.",
    ),
    "ignored-attention": warning(
        "{on} does nothing with {scaling} scaling: attention stays as it is without.",
        "Megatron hands both fields to TransformerEngine's recipe of delayed scaling, to that of tensorwise scaling "
        "attention alone (fp8_dot_product_attention), to that of MXFP8 neither.",
        "Set {off}; or scaling='delayed': nemo_fp8's plugin refuses the other.",
    ),
    "e5m2-gradients-mxfp8": warning(
        "Gradients in E5M2 with MXFP8.",
        "Scales of 32 values need mantissa, not range: runs with format='hybrid' diverge (Megatron-Bridge#638).",
        "Set format='e4m3'.",
    ),
    "e5m2-gradients-blockwise": info(
        "Gradients in E5M2 with blockwise scaling.",
        "NeMo ships it so; TransformerEngine's own block default, DeepSeek-V3 and NeMo RL keep gradients in E4M3.",
        "Set format='e4m3', unless the run must equal NeMo's.",
    ),
    "fp4-backward-1x16": error(
        "An NVFP4 backward with weights in 1x16 blocks.",
        "The backward contracts the other dimension of a weight, and so casts it in other blocks: about 77% of the "
        "elements that it multiplies by are not the forward's, and 13% lie between both in norm, the same way in every "
        "step. NVIDIA's GRPO with it did not learn, and with 16x16 blocks it did; sixty steps of pretraining a tiny "
        "model show no difference.",
        "Set weight_block='16x16', backward='dequantized' or 'high_precision', or backward_scaling='mxfp8'.",
    ),
    "nvfp4-rollout-activations": info(
        "The rollout rounds activations to NVFP4, too.",
        "Of NVFP4 rollouts in reinforcement learning, those with activations in BF16 (W4A16) are known to converge as "
        "BF16 does.",
        "Set activation_scheme='none', or train with the same activations (row_scaled=True).",
    ),
    "nvfp4-rollout-fixed-scale": info(
        "vLLM rounds the rollout's activations beneath one fixed scale of 1, unless it is told otherwise.",
        "The contract has an FP32 scale for each token. vLLM's kernels for linears take one for a layer, and nothing "
        "is calibrated: blocks whose largest value is below 0.1 lose precision that training keeps.",
        "On a CPU start the engine with activations='emulated' (engine_args, or nemo-fp8 serve --activations); or set "
        "activation_scheme='none'.",
    ),
    "ignored-nvfp4": warning(
        "{field}={value!r} does nothing with {scaling}.",
        "Only NVFP4 has it.",
        "Leave {field} out, or set format='e2m1' and scaling='nvfp4'.",
    ),
    "fp16-delayed-freeze": warning(
        "Dynamic FP16 loss scaling from {scale:g} with an amax history of {history} steps ({algo}).",
        "The first overflows put inf into the history, and the backward scales stand still until it has left it.",
        "Set initial_loss_scale=65536, or amax_compute_algo='most_recent' with amax_history_len=1, or "
        "scaling='tensorwise'.",
    ),
    "rollout-without-correction": info(
        "FP8 rollout without importance sampling.",
        "The tokens come from another distribution than the trainer's; long rollouts from a BF16 trainer have "
        "collapsed on it.",
        "Set importance_sampling=True, and watch token_mult_prob_error.",
    ),
    "bf16-train-fp8-rollout": warning(
        "Training in {compute}, rollout in FP8.",
        "The rollout samples from quantized weights that the trainer never sees; Jet-RL (arXiv 2601.14243) saw long "
        "rollouts collapse.",
        "Train in FP8 with the same scales (format, scaling), or keep importance_sampling=True and gate on the "
        "mismatch.",
    ),
    # ------------------------------------------------------------ the parallel layout
    "mxfp8-overlap-param-gather": error(
        "mxfp8 FP8 primary weights with overlap_param_gather.",
        "NeMo 2.7.3 zeroes the buffer that holds the gathered weights and never copies them back: the weights are "
        "destroyed in silence.",
        "Set overlap_param_gather=False, or train with nemo_fp8's plugin, which copies them back.",
    ),
    "fp8-param-needs-distributed-optimizer": error(
        "fp8_param=True without the distributed optimizer.",
        "Megatron casts FP32 master weights to FP8 primary weights only in the distributed optimizer (or FSDP). Its "
        "own command line refuses anything else; NeMo does not, and with mxfp8 ends in an AttributeError.",
        "Set use_distributed_optimizer=True on the optimizer and DDP configs, or fp8_param=False "
        "(fp8_param_gather=False).",
    ),
    "mxfp8-param-needs-reuse": warning(
        "mxfp8 FP8 primary weights without reuse_grad_buf_for_mxfp8_param_ag.",
        "The gather then needs a BF16 buffer of its own, and TransformerEngine 2.9 raises NotImplementedError.",
        "Set reuse_grad_buf_for_mxfp8_param_ag=True, or fp8_param=False.",
    ),
    "reuse-without-mxfp8-param": warning(
        "reuse_grad_buf_for_mxfp8_param_ag=True without mxfp8 FP8 primary weights.",
        "There is nothing to gather through the gradient buffer; NeMo and Megatron take it without a word.",
        "Set it to False, or scaling='mxfp8' with fp8_param=True.",
    ),
    "fp8-param-saves-nothing": info(
        "fp8_param=True with mxfp8 saves no bytes on the wire.",
        "MX needs a cast for each direction, made from BF16 after the gather: the gather moves BF16.",
        "Keep it for the memory of the weights, or set fp8_param=False.",
    ),
    "sequence-parallel-without-tensor-parallel": warning(
        "Sequence parallelism without tensor parallelism.",
        "There are no tensor-parallel ranks to split the sequence over.",
        "Leave sequence parallelism out.",
    ),
    "experts-need-sequence-parallel": error(
        "Expert parallelism with tensor parallelism, and no sequence parallelism.",
        "megatron-core 0.15.3 means to warn and ends in NameError: name 'warnings' is not defined.",
        "Turn sequence parallelism on (sp).",
    ),
    # ------------------------------------------------------------ the model's shapes
    "layers-all-kept": error(
        "first_layers={first} and last_layers={last} keep all {num_layers} layers in {compute}: nothing runs in FP8.",
        "NeMo and Megatron accept it and train in {compute} without a word.",
        "Use a model of more than {kept} layers, or keep fewer (num_layers_at_start_in_bf16 and "
        "num_layers_at_end_in_bf16 in NeMo).",
    ),
    "layers-all-matched": error(
        "keep={keep} matches every linear layer: nothing runs in FP8.",
        "A pattern that is wider than it looks takes the whole model out.",
        "Narrow the patterns.",
    ),
    "keep-matches-nothing": warning(
        "{field} holds {pattern!r}, which matches no linear layer of the model.",
        "Names are matched in Megatron's form (decoder.layers.0.mlp.linear_fc1), in Hugging Face's "
        "(model.layers.0.mlp.up_proj) and in vLLM's (model.layers.0.mlp.gate_up_proj).",
        "Correct the pattern, or leave it out.",
    ),
    "rule-overruled": warning(
        "The rule ({pattern!r}, {recipe!r}) in modules decides nothing.",
        "A linear obeys the first name in keep that matches it, or else the first rule, and all that this one matches "
        "obeys {before}.",
        "Move the rule up, narrow what stands before it, or leave it out.",
    ),
    "not-divisible": error(
        "{quantity} {value} is not divisible by {by}.",
        "Megatron splits it evenly over the ranks, and raises where it cannot.",
        "Choose a {parallel} that divides it.",
    ),
    "gqa-replicated": info(
        "{kv} key-value heads over a rollout-tp of {tp}: ranks hold copies.",
        "vLLM repeats key-value heads where there are fewer than ranks.",
        "Nothing to do; a smaller rollout-tp saves the copies.",
    ),
    "shape": error(
        "{layer} [{rows} x {columns}] on each rank does not fit {scaling}: {reason}.",
        "TransformerEngine raises in the first step; nemo_fp8's plugin keeps such a layer in {compute}, or refuses it "
        "with strict=True.",
        "Choose a tp or a size that leaves multiples, or add the layer to keep.",
    ),
    "param-shape": warning(
        "{layer} [{rows} x {columns}] on each rank is no FP8 primary weight of whole blocks: {reason}.",
        "Its blocks at the edges are cut short. TransformerEngine 2.20 trains so; with an older one NeMo RL#1164 "
        "trained to NaN under TP.",
        "Choose a tp that leaves multiples of 128, or set fp8_param=False.",
    ),
    "block-straddles-ranks": info(
        "{layer} [{rows} x {columns}] on each rank has ragged 128x128 blocks.",
        "A block at the edge is smaller than 128, and its grid differs from the unsplit weight's: scales change with "
        "tp.",
        "Choose a tp that leaves multiples of 128, where results must not depend on it.",
    ),
    "grids-differ": warning(
        "{layer} [{rows} x {columns}] has other 128x128 blocks in training than in rollout: {reason}.",
        "Megatron fuses the weight, so a block covers rows of two Hugging Face weights, whose own blocks are scaled "
        "apart.",
        "Use it with importance_sampling=True: the same contract gives two roundings of these weights. Sizes in "
        "multiples of 128 do not.",
    ),
    "tokens": error(
        "{tokens} tokens on each rank are not a multiple of {multiple}.",
        "The weight-gradient GEMM of {scaling} contracts over tokens, in steps of {multiple}.",
        "Choose a sequence length and micro batch so that tokens are a multiple of {multiple}.",
    ),
    "padding": info(
        "Packed sequences need padding to a multiple of {multiple}.",
        "{factors}.",
        "Pad each packed sequence to {multiple}; NeMo RL's make_sequence_length_divisible_by must be a multiple of it.",
    ),
    "padding-too-small": error(
        "Packed sequences are padded to {given}, and need a multiple of {multiple}.",
        "{factors}.",
        "Set the padding to a multiple of {multiple}.",
    ),
    "does-not-fit": error(
        "The fullest GPU (pipeline stage {stage}) needs {need}, and has {have}.",
        "Weights, FP8 casts, gradients and the optimizer's share alone take that much; activations come on top.",
        "Spread it wider (tp, pp, dp with the distributed optimizer); nemo-fp8 memory shows the items.",
    ),
    "expert-tokens": info(
        "Each expert's tokens are padded to a multiple of {multiple}.",
        "A router gives an expert any number of tokens, and {scaling} GEMMs take multiples of {multiple}.",
        "Nothing to do: Megatron's grouped MLP pads, with a copy. moe_router_padding_for_fp8 saves it; NeMo's plugin "
        "cannot reach that.",
    ),
    "router-kept": info(
        "The router of {experts} experts stays in high precision.",
        "Rounding its logits changes which experts are chosen.",
        "Nothing to do: nemo_fp8 keeps it out of training's and of rollout's FP8.",
    ),
    "vocab-padding": info(
        "The vocabulary of {vocab} is padded to {padded}.",
        "Megatron rounds it up to a multiple of 128 x tp; embeddings and the output head stay in high precision.",
        "Cut the padding off when exporting to Hugging Face.",
    ),
    "kept-on-one-side": warning(
        "{layer} runs in FP8 in {one} and in {compute} in {other}.",
        "A keep pattern names a part of what the rollout's engine holds as one ({whole}): the engine keeps it all, "
        "training what is named.",
        "Name all of it in keep, or none.",
    ),
    "rollout-kept": warning(
        "{layer} [{rows} x {columns}] stays in {compute} in rollout: {reason}.",
        "Engines and their kernels take whole blocks; plugin and exporter keep every other layer, or refuse it with "
        "strict=True.",
        "Choose sizes in multiples of 128, keep the layer by name to say so, or set rollout='compute'.",
    ),
    "rollout-shape": warning(
        "{layer} [{rows} x {columns}] on each rollout rank cuts 128x128 blocks: {reason}.",
        "vLLM refuses a weight that is quantized already (vllm#44763: 768/TP4 = 192); nemo_fp8's plugin gives ranks "
        "their own blocks.",
        "Use a rollout-tp (vLLM's tensor_parallel_size) of {remedy}, expert parallelism for experts (rollout-ep), or "
        "rollout='compute'.",
    ),
    "rollout-kv-shard": warning(
        "Each rollout rank holds {rows} rows of K and of V, less than a 128x128 block.",
        "vLLM refuses a pre-quantized checkpoint there; its online quantization works, with blocks over K and V that "
        "are not training's.",
        "Use a rollout-tp of at most {most}, or accept another grid than training's with online quantization.",
    ),
    "deepgemm-shape": warning(
        "{layer} [{rows} x {columns}] on each rollout rank does not run on DeepGEMM.",
        "DeepGEMM takes multiples of 128 on both sides; vLLM runs the layer on another kernel without a word.",
        "Choose a rollout-tp that leaves multiples of 128, or set deep_gemm=False.",
    ),
    # ------------------------------------------------------------ what is installed, and the environment
    "nemo-mcore": error(
        "megatron-core {mcore} with NeMo {nemo}.",
        "NeMo 2.7 works with megatron-core 0.15: 0.16 changed get_megatron_optimizer, 0.14 lacks names that it "
        "imports.",
        MEGATRON_CORE,
    ),
    "bridge-mcore": error(
        "megatron-core {mcore} with Megatron-Bridge {bridge}.",
        "Megatron-Bridge 0.3 takes 12 names from megatron-core that 0.15 does not have, although it says 0.15 will do.",
        "Install megatron-core==0.16.1 (constraints/bridge.txt), in another environment than NeMo 2.7.",
    ),
    "nemo-3": error(
        "nemo-toolkit {nemo} has no LLM collection.",
        "From 3.0 on, NeMo is speech alone; its LLM recipes went to Megatron-Bridge.",
        "Install nemo-toolkit==2.7.3, or render the contract for Megatron-Bridge.",
    ),
    "te-library-missing": error(
        "transformer-engine {te} is a Python wheel without its compiled library.",
        "Importing it raises RuntimeError, and megatron-core, which expects ImportError, cannot be imported any more.",
        "Install transformer-engine[pytorch] with its library; on a machine without a GPU the wheel alone is right.",
    ),
    "te-not-stood-for": error(
        "transformer-engine {te} without a GPU.",
        "nemo_fp8 stands in for the compiled extension of {tested}, which is a private interface and changes with "
        "every version.",
        "pip install --no-deps transformer-engine=={tested}",
    ),
    "te-delayed-resume": warning(
        "A run with delayed scaling cannot be resumed: NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE is not 1.",
        "TransformerEngine 2.20 keeps delayed scales in checkpoints as a pickle, and refuses to read it without that "
        "word.",
        "Set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 in the executor's env_vars, for checkpoints of your own; or take "
        "another recipe.",
    ),
    "attention-resume": warning(
        "A run with FP8 attention and delayed scaling does not resume to the bit.",
        "Megatron leaves the state of attention out of its checkpoints (TEDotProductAttention.sharded_state_dict, "
        "0.15.3 and 0.16.1): its scales begin at 1 again, and its amax histories empty.",
        "Take it as it is, since scales are found again within a step or two; or leave attention out of the contract "
        "(fp8_dot_product_attention=False).",
    ),
    "cpu-initialization": info(
        "FP8 weights that Megatron initializes on the CPU (use_cpu_initialization) need this package's plugin.",
        "Megatron constructs such a weight from uninitialised memory, from which TransformerEngine keeps what the "
        "master weights are made of, and draws its values afterwards. Under NeMo's own plugin the first step is NaN, "
        "or the loss falls on random weights, on a GPU too; ours gives the masters the values that were drawn.",
        "Train with this plugin, or leave use_cpu_initialization=False.",
    ),
    "te-dtype-pickle": warning(
        "With Python 3.11 a run with FP8 weights cannot be resumed.",
        "Megatron writes these weights as TransformerEngine's own tensors. Python 3.11 pickles their DType as a call "
        "of getattr, which torch's distributed checkpoints refuse to read.",
        "Use Python 3.10 or 3.12, or fp8_param_gather=False. On a machine without a GPU nemo_fp8 mends it.",
    ),
    "te-absent": warning(
        "There is a GPU, and no TransformerEngine.",
        "Without it NeMo and Megatron train in BF16 where FP8 was asked for, and say nothing.",
        "Install transformer-engine[pytorch].",
    ),
    "mock-data": info(
        "NeMo's MockDataModule does not work without TransformerEngine.",
        "It hands create_attention_mask to its dataset as the seed, and has no state to resume from.",
        "Use another data module.",
    ),
    "te-newer": info(
        "TransformerEngine {te} is newer than the support table.",
        "Its rules were read from TransformerEngine 2.3 to 2.20.2.",
        "Check the answer against TransformerEngine's own is_fp8_available functions.",
    ),
    "numpy-mcore": error(
        "numpy {numpy} with megatron-core {mcore}.",
        "megatron-core 0.15 uses np.product to save a checkpoint, which numpy 2 has no more.",
        "Install numpy<2.",
    ),
    "extension-lock": warning(
        "{path} is {minutes} minutes old, and no process of this machine that can be seen holds it.",
        "torch makes it while it compiles an extension, and whoever needs the extension waits until it goes: for ever, "
        "without a word, where the process that made it was killed. megatron-core 0.15 compiles "
        "managed_alloc_runtime whenever it is imported, 0.16 when unified memory is asked for.",
        "Unless another machine that shares the folder compiles just now: rm {path}",
    ),
    "torchvision-vllm-cpu": error(
        "A CUDA build of torchvision beside vLLM's CPU build.",
        "Importing vLLM fails with: operator torchvision::nms does not exist.",
        "Install torchvision from PyTorch's CPU index (https://download.pytorch.org/whl/cpu), or uninstall "
        "torchvision, torchaudio and torchcodec: Qwen2.5-VL, Qwen3-VL and Qwen3.5 (its text-only models too) do not "
        "start without torchvision, other text models do.",
    ),
    "onednn-kept-from-amx": error(
        "{name}={value} on a processor with AMX.",
        "vLLM asks the processor and multiplies BF16 and FP8 weights by AMX, through oneDNN, which this variable keeps "
        "from it: the first prompt ends a worker, with an abort in C++ that names Brgemm and amx.",
        "Unset {name} where vLLM runs.",
    ),
    "driver": warning(
        "Driver {driver} with a torch for CUDA {cuda}.",
        "CUDA {major} needs driver {least} or newer, unless NVIDIA's forward-compatibility package is installed.",
        "Update the driver to {least}, or install a torch for an older CUDA.",
    ),
    "environment-late": error(
        "{name}={value!r} was set after TransformerEngine was imported, which goes on with {frozen!r}.",
        "TransformerEngine reads it once, when it is imported; setting it later does nothing.",
        "Set it in the shell, in the executor's env_vars, or before anything imports megatron or transformer_engine.",
    ),
    "environment-against-contract": error(
        "{name}={value!r} says {says}, the contract says {contract}.",
        "TransformerEngine takes its default scales from the variable, against the contract.",
        "{remedy}",
    ),
    "environment-missing": info(
        "{name} is not set, and the contract wants {contract}.",
        "TransformerEngine's default is otherwise, and Megatron makes its recipe without arguments. nemo_fp8's plugin "
        "and bridge_config hand a recipe to linears with a rule or a backward of their own, and refuse the run if "
        "others would have another; other launchers train without a word.",
        "Set {name}={value} before TransformerEngine is imported; `nemo-fp8 render CONTRACT --to env` writes it.",
    ),
    "environment-set": info("{name}={value!r} is set.", "{meaning}", "Unset it, if it is not meant."),
    # ------------------------------------------------------------ a run's configs, as NeMo left them
    "run-setting-dropped": error(
        "{name}={value!r} did not reach the model: {config} {has}.",
        "NeMo drops a setting that a config has no field for, and somebody may write over it later.",
        "Use a Megatron-core model config, and do not set FP8 fields on it after the trainer is built.",
    ),
    "run-model-asks-for-fp8": error(
        "The model's config asks for FP8 (fp8={fp8!r}), and the precision plugin for none.",
        "NeMo's plugin would erase the model's setting, and the run would go on without FP8.",
        "Give an FP8 plugin, such as trainer.plugins=bf16_with_fp8_blockwise_mixed(), and leave fp8 off the model's "
        "config.",
    ),
    "run-model-asks-for-fp4": error(
        "The model's config asks for FP4 (fp4={fp4!r}).",
        "The contract says otherwise, and the plugin writes its settings over the config's.",
        "Leave fp4 off the model's config, and choose bf16_with_nvfp4_mixed.",
    ),
    "run-offloaded-optimizer": error(
        "FP8 primary weights with {scaling} scaling and optimizer_cpu_offload.",
        "Megatron's offloaded optimizer casts FP8 weights for delayed scaling only.",
        "Set optimizer_cpu_offload=False, fp8_param_gather=False, or fp8_recipe='delayed'.",
    ),
    "run-context-parallel-on-cpu": error(
        "context_parallel_size={context_parallel_size} on a machine without a GPU.",
        "TransformerEngine's attention over ranks is made of cuDNN's or FlashAttention's kernels, which have no "
        "counterpart on a CPU: the first forward would end in 'No dot product attention backend is available'.",
        "Set context_parallel_size=1, or train on GPUs.",
    ),
    "run-recomputes-bias": error(
        "recompute_modules={recompute_modules} and add_bias_linear=True.",
        "Megatron hands the bias itself on from the MLP that it recomputes, and autograd takes it for a result of the "
        "recomputation, which then never ends: the first backward hangs, or ends in 'pop from an empty deque'.",
        "Leave 'mlp' out of recompute_modules, recompute whole layers (recompute_granularity='full'), or set "
        "add_bias_linear=False.",
    ),
    "run-recomputes-attention": error(
        "recompute_modules={recompute_modules} with FP8 attention and delayed scaling.",
        "Megatron recomputes attention without telling TransformerEngine, which casts by the scales of the next step "
        "then, and counts amaxes twice: backward belongs to another forward than the one that ran.",
        "Leave 'core_attn' out of recompute_modules, recompute whole layers (recompute_granularity='full'), or set "
        "fp8_dot_product_attention=False and fp8_multi_head_attention=False.",
    ),
    "run-gathers-no-fp8": error(
        "The DDP config gathers FP8 parameters, and the contract has none.",
        "The gather would carry bytes that nobody wrote.",
        "Leave fp8_param_gather off the DDP config: the plugin sets it.",
    ),
    "bridge-loads-into-fp8": error(
        "A run of Megatron-Bridge {bridge}with FP8 weights that starts from a Hugging Face checkpoint.",
        "AutoBridge.to_megatron_provider(load_weights=True) writes into the FP8 weights, and the optimizer makes its "
        "master weights from what TransformerEngine kept of them before: uninitialised memory, or a random "
        "initialization. The first step writes that over the weights: NaN, or a falling loss on random weights.",
        "Set config.mixed_precision to nemo_fp8.bridge.bridge_config(...), or call "
        "nemo_fp8.bridge.load_exactly(provider); or AutoBridge.import_ckpt, then pretrained_checkpoint with "
        "load_optim=False and load_main_params_from_ckpt=True.",
    ),
    "start-masters-from-fp8": warning(
        "FP8 weights from pretrained_checkpoint, without load_optim=False and load_main_params_from_ckpt=True.",
        "Megatron-Bridge then makes the master weights from the FP8 codes: 2.65 % away from the checkpoint.",
        "Set checkpoint.load_optim=False and checkpoint.load_main_params_from_ckpt=True.",
    ),
    "start-no-tokenizer": error(
        "{folder} holds no tokenizer.",
        "The run's TokenizerConfig(tokenizer_type='HuggingFaceTokenizer') names it, and Megatron-Bridge would end in "
        "transformers' own error, which speaks of other causes.",
        "Save the tokenizer there (tokenizer.save_pretrained), name a folder that has one as tokenizer_model, or set "
        "tokenizer_type='NullTokenizer' with vocab_size.",
    ),
    "start-import-no-tokenizer": error(
        "{folder} holds no tokenizer.",
        "AutoBridge.import_ckpt writes all weights and then reads one from there: it ends in transformers' own error, "
        "which speaks of other causes.",
        "Save the tokenizer there (tokenizer.save_pretrained), or write the weights alone: "
        "auto.save_megatron_model(auto.to_megatron_model(wrap_with_ddp=False), folder).",
    ),
    "run-refused-by-megatron": error(
        "Megatron refuses {config} as the plugin left it.",
        "{error}",
        "Change the setting that Megatron names, in the precision factory or in the config.",
    ),
    # ------------------------------------------------------------ training against rollout
    "sides-compute": error(
        "Training computes in {train}, the rollout in {rollout}.",
        "Every layer rounds differently on the two sides.",
        "Give both the same compute dtype.",
    ),
    "sides-format": warning(
        "{one} multiplies in {format} and {other} in {compute}.",
        "Such a copy lies {from_master}% in norm from the weights that {other} uses; on long rollouts such a policy "
        "was seen to collapse.",
        "Use {format} on both sides, with the same scales ({fields}).",
    ),
    "sides-delayed": warning(
        "{heading}: training {does} {train}; the rollout {does} {rollout}.",
        "The same {tensors} are rounded to other values on the two sides{cost}.",
        "Train with scaling='blockwise' or 'tensorwise': scales that come from earlier steps exist on no other side.",
    ),
    "sides-calibrated": warning(
        "{heading}: training {does} {train}; the rollout {does} {rollout}.",
        "The same {tensors} are rounded to other values on the two sides{cost}.",
        "Set activation_scheme='dynamic': calibrated scales exist on the rollout's side only.",
    ),
    "sides-scales": warning(
        "{heading}: training {does} {train}; the rollout {does} {rollout}.",
        "The same {tensors} are rounded to other values on the two sides{cost}.",
        "Set {field} to the same on both sides: 'pow2' (TransformerEngine's default) or 'fp32' (NeMo RL's).",
    ),
    "sides-blocks": warning(
        "{heading}: training {does} {train}; the rollout {does} {rollout}.",
        "The same {tensors} are rounded to other values on the two sides{cost}.",
        "Train with scaling='blockwise' and generate with rollout_block='128x128', or set both scales to 'pow2' "
        "whatever the blocks. Modules with a rule: give them 'blockwise'.",
    ),
    "sides-underflow": info(
        "{heading}: training {does} {train}; the rollout {does} {rollout}.",
        "Powers of two only move the exponent: codes and scales differ, and values where a code underflows (up to "
        "{most}% of Gaussian ones).",
        "Nothing to do; nemo_fp8.mismatch.sides_apart counts it on weights.",
    ),
    "sides-layers": error(
        "The {which} {train} layers train in {compute}, the {which} {rollout} generate in it.",
        "The layers between are quantized on one side only.",
        "Set {field} to the same number on both sides{delayed}. If names keep the same layers, give check the model's "
        "config (model=, --model), which says so.",
    ),
    "sides-modules": error(
        "Kept in {compute} on one side only: {names}.",
        "Such a module is quantized on the other side.",
        "Give both sides the same keep, first_layers and last_layers.",
    ),
    "sides-shapes": warning(
        "Kept in {compute} on one side only, by their shape: {names}.",
        "Training and rollout have other blocks, and these linears fit in those of one side only.",
        "Name them in keep, on both sides.",
    ),
    "sides-four-bits": warning(
        "{heading}: training {does} {train}; the rollout {does} {rollout}.",
        "E4M3 scales are no powers of two: other blocks round the same {tensors} to other values{cost}.",
        "Weights: set weight_block='1x16', four_over_six='none' and backward='dequantized'. Activations: set "
        "row_scaled=True and backward='dequantized', or activation_scheme='none' and importance_sampling=True.",
    ),
    "sides-activations": info(
        "{heading}: training casts to {train}; the rollout leaves them in {compute}.",
        "The weights are the same. Training rounds what they are multiplied by and the rollout does not, so "
        "log-probabilities differ, and the importance ratio does not start from 1.",
        "Keep importance_sampling=True, which corrects for it; or set activation_scheme='dynamic' and, with NVFP4, "
        "row_scaled=True.",
    ),
    "sides-recipes": error(
        "The two sides hold modules in other elements, or with other scales: {names}.",
        "A rule for modules (modules=) that only one side has makes the rollout another model than the one that is "
        "trained.",
        "Give both sides the same rules.",
    ),
    "sides-units": warning(
        "What an engine holds with others as one matrix runs otherwise there than in training: {names}.",
        "An engine holds all routed experts of a layer as one, and DeepSeek's two down projections: what the contract "
        "says of a part of them by name holds for all of them in the rollout, and in training for this part.",
        "Name all of them ('*.experts.*'), or none ('*.mlp.linear_fc1' means a dense model's alone).",
    ),
    "sides-attention": warning(
        "Training attends in FP8, the rollout in {compute}{beside}.",
        "Training rounds queries, keys, values and probabilities, by scales of its own tensors, which no rollout has.",
        "Set attention=False and multi_head_attention=False, or correct for it (importance_sampling=True).",
    ),
    "sides-kv-cache": warning(
        "The rollout keeps its KV cache in FP8, training attends in {compute}.",
        "Attention reads rounded keys and values on one side only.",
        "Set kv_cache='auto', or correct for it (importance_sampling=True).",
    ),
    "sides-correction": info(
        "The policy loss is not corrected for the difference between trainer and rollout.",
        "Equal values do not make GEMMs equal: the two sides add up in another order.",
        "Set importance_sampling=True (NeMo RL: loss_fn.use_importance_sampling_correction).",
    ),
    "nemo-rl-not-enabled": warning(
        "policy.megatron_cfg.fp8_cfg has no 'enabled'.",
        "NeMo RL trains without FP8 and without a word unless it is there.",
        "Add enabled: true.",
    ),
    "nemo-rl-not-read": warning(
        "{key} is a key of NeMo RL's document, not of its code.",
        "NeMo RL ignores it and takes its default, FP32 scales.",
        "Write {right} instead.",
    ),
    "nemo-rl-nvfp4-missing": error(
        "{key} is missing, or says something else.",
        "NVFP4 is said in five places of NeMo RL, and one that is missing starts cleanly and trains something else "
        "than the rollout generates with.",
        "Set it: {wanted}. `nemo-fp8 render CONTRACT --to nemo-rl` writes all five of a contract that trains as its "
        "rollout generates (docs/nemo_rl.md has one).",
    ),
    "nemo-rl-modelopt": warning(
        "{key} has ModelOpt quantize both sides by {train}.",
        "It acts beside the contract, and what it does is not compared.",
        "Nothing to do, if that is meant.",
    ),
    "nemo-rl-modelopt-differs": warning(
        "{key} has ModelOpt quantize by {train} in training and {rollout} in the rollout.",
        "It acts beside the contract, and what it does is not compared.",
        "Give both the same quant_cfg.",
    ),
    "nemo-rl-rollout-not-compared": info(
        "The rollout is not compared: {key} {says}.",
        "Only the settings of vLLM are read, and Megatron's where it generates with what it trains.",
        "Write the rollout's precision as a contract: `nemo-fp8 check TRAINING ROLLOUT` compares the two.",
    ),
    "nemo-rl-changes-numbers": info(
        "Not compared, though it changes numbers: {names}.",
        "A contract says how linear layers are stored; the head, the router and log-probabilities are beside it.",
        "Give both sides the same where both have the key.",
    ),
    "nemo-rl-kv-layout": info(
        "{key}: {layout} is read as an FP8 KV cache.",
        "It is vLLM's own layout of one, for latent attention: a contract has no word for the layout, so `fp8` is "
        "written back.",
        "Write {layout} again in a file that is rendered from this contract.",
    ),
    # ------------------------------------------------------------ what the engine computes, and what it holds
    "gate-nan": error(
        "{count} of the rollout's log-probs are NaN.",
        "An FP8 engine with scales that are missing, zero or NaN answers so. In JSON lines, so does a null where the "
        "trainer has a number.",
        "Push the weights again with verify=True, and require the receipt.",
    ),
    "gate-limit": error(
        "{metric} is {value:.4g}.", "Its limit is {limit:.4g}.", "See what changed since it was below."
    ),
    "gate-distance": error(
        "Trainer and rollout are {times:.1f} times as far apart as the contract makes them.",
        "Their log-probs typically differ by {observed:.3g}, and rounding leaves that below {high:.3g}.",
        "{remedy}",
    ),
    "gate-residual": error(
        "The rollout is {times:.1f} times as far from its emulation as arithmetic makes it.",
        "The engine does not compute with the trainer's weights under this contract: {observed:.3g}, where {high:.3g} "
        "is the most.",
        "{remedy}",
    ),
    "gate-too-close": warning(
        "Trainer and rollout are closer than the contract lets them be.",
        "It leaves at least {low:.3g}, and here are {observed:.3g}: an engine that silently runs in BF16.",
        "Look for the quantization method in the engine's log.",
    ),
    "weight-missing": error(
        "{name} was not found in the engine.",
        "{detail}.",
        "Push every tensor of the model; the receipt's manifest names what an engine lacks.",
    ),
    "weight-zeroed": error(
        "{name} is zeroed in the engine.",
        "{detail}.",
        "Push again; if it stays, the engine's loader drops scales (verl#7224 was one).",
    ),
    "weight-swapped": error(
        "{name} is another tensor in the engine.",
        "{detail}.",
        "Correct the order of fused parts where names are mapped, and push again.",
    ),
    "weight-stale": error(
        "{name} is stale in the engine.", "{detail}.", "Push again, and require the receipt: a tensor was not written."
    ),
    "weight-differs": error(
        "{name} is not the trainer's in the engine.",
        "{detail}.",
        "Push again with verify=True; the receipt says what was written.",
    ),
    "weight-scales": warning(
        "{name} has other scales than the contract's.",
        "{detail}.",
        "Give trainer and rollout one contract; only codes and scales differ.",
    ),
}
