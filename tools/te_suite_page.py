"""The results of ``te_suite`` as data and as a page: counts of every file, and every failure with its cause.

A cause is a row of :data:`CAUSES`: words of the file and test, words of the error, and what it is. A failure that no
row explains is listed as unexplained, with its error. So a row says only what was found out; ``ours`` marks those that
are the implementation's to mend.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA, PAGE = "te_suite.json", "te_suite.md"
LEFT_OUT = {
    "test_float8tensor": "is `test_quantized_tensor` since December 2025: TE renamed it (its commit c09411d82)",
    "test_sanity_import": "has no tests: it imports TE and prints OK",
    "test_cuda_graphs": "is about CUDA graphs",
    "test_torch_compile": "is about compiled code, and te_cpu runs what `torch.compile` is given uncompiled",
    "test_fused_router_perf": "measures the speed of a GPU",
    "attention/test_flex_attention": "is about kernels that cuDNN's frontend builds",
    "attention/test_attention_with_cp": "needs flash or fused attention, on four GPUs",
    "distributed/test_comm_gemm_overlap, distributed/test_fusible_ops_with_userbuffers": "are about userbuffers",
    "distributed/test_ep": "is about expert parallelism over NCCL",
    "distributed/test_newton_schulz": "is about Newton-Schulz in cuSOLVERMp, which has no CPU implementation",
}
"""Files of TE's suite that are not run, and why."""


@dataclass(frozen=True)
class Cause:
    """Why tests fail whose ``file::test`` and whose error line these patterns find."""

    test: str
    error: str
    why: str
    ours: bool = False


_STOPPED = r"Timeout \(>|did not answer within"
_SUMS = "asks equal bits of a GEMM, whose sums depend on their order"
_FURTHER = "which on a CPU is further from FP64 than this implementation"
CAUSES: tuple[Cause, ...] = (
    Cause(
        "test_quantized_tensor|test_grouped_tensor|weight_swizzle_cache",
        r"CUDAGraph",
        "needs CUDA graphs; where a replay runs the lines of the capture again, in Python, they pass",
    ),
    Cause("", r"CUDAGraph", "needs CUDA graphs"),
    Cause(
        "test_cpu_offloading",
        r"No dot product attention backend is available",
        "asks for flash or fused attention, which are on GPUs only, or comes after such a test, whose choice of none TE "
        "keeps",
    ),
    Cause(
        r"attention/test_kv_cache.*\[True-False-\w+-UnfusedAttention",
        r"Mismatched elements",
        "holds FP8 to BF16 where TE skips it on a GPU: probabilities are rounded by delayed scaling's first scale, 1, "
        "which inference never renews; without that rounding it passes",
    ),
    Cause(
        "uses_plain_bf16_mha_boundaries",
        r"KeyError: 'fp8_o'",
        "looks at what TE hands to cuDNN's fused attention; here TE emulates it",
    ),
    Cause("", r"libcuda.so cannot found", "runs a Triton kernel, which needs a GPU", ours=True),
    Cause(
        "",
        r"transformer_engine[\w.]*\.(\w+) has no CPU implementation",
        "calls `{0}`, which has no CPU implementation",
        ours=True,
    ),
    Cause("", r"(\w+) with context parallelism \S+ has no CPU", "calls `{0}` with context parallelism", ours=True),
    Cause(
        "",
        r"assert 'cpu' == 'cuda'|device\(type='cuda', index=0\), True\) in \{.*device\(type='cpu'\)",
        "compares the name of a device with cuda, and that of the CPU that stands for it is cpu; told cuda where they "
        "ask, those of test_grouped_tensor pass",
    ),
    Cause(
        "grouped_mlp",
        r"require the native grouped-tensor GroupedLinear path",
        "needs cuBLAS 13.3, and te_cpu stands for CUDA 12.9's, for which TE takes its other path; told of 13.6 it passes",
    ),
    Cause(
        "distributed/test_sanity.*test_current_device",
        r"assert 0 == 1",
        "asks on which of two devices a tensor lies, and the CPU is one",
    ),
    Cause(
        "distributed/test_sanity.*test_current_device",
        r"cannot be broadcast to indexing result|cu_seqlens tells of \d+ tokens",
        "draws lengths at random, and may tell of more keys than there are, where a GPU reads on behind them",
    ),
    Cause("test_record_stream", r"isValidDeviceType", "hands a CUDA stream to an operator of torch itself"),
    Cause(
        "current_scaling_gemm_versus_reference",
        r"Mismatched",
        f"asks equal bits of torch's own product of FP8 numbers, {_FURTHER}",
    ),
    Cause(
        "test_mha_accuracy",
        r"Outputs not close enough",
        f"holds BF16 gradients to those of torch's own attention, {_FURTHER}",
    ),
    Cause(
        "test_layernorm_accuracy",
        r"Outputs not close enough",
        f"holds FP32 gradients to those of torch's own layer norm, {_FURTHER}",
    ),
    Cause(
        "debug/test_api_features.*multi_run",
        r"Scalars are not close",
        "asks one norm of two million numbers of the norms of its halves, by torch's own, whose FP32 sum on a CPU "
        "is off by 7e-5",
    ),
    Cause("test_trt_integration", r"module 'tensorrt'", "runs in TensorRT, which needs a GPU"),
    Cause(
        "cross_entropy.*test_bfloat16_input", r"not close", f"holds a loss to torch's own of BF16 logits, {_FURTHER}"
    ),
    Cause(
        "test_bfloat16_unreduced_external_grad",
        r"assert 3 == 1",
        "expects of another version of TE what 2.20.2's own Python saves",
    ),
    Cause(
        "attention/test_attention",
        r"core_attention_bias tensor must be in one of",
        "gives the shape of a bias by its name, as TE's Python takes it on that tree, where 2.20.2's takes numbers",
    ),
    Cause(
        r"distributed/test_numerics.*\[nvfp4\]",
        r"AssertionError",
        "bounds by one draw of random numbers what NVFP4 shards of a weight, each with an amax of its own, differ "
        "from the whole: 0.127, where 0.12 is allowed; with three of five other seeds it passes",
    ),
    Cause(
        "hybrid_quantization.*TestHybridAllModules::test_(transformer_layer|layernorm_mlp)",
        r"fc2_weight' differs|not close.* \(up to 0.0009765625 allowed\)",
        "bounds by one draw of random numbers what two scales of GELU's output differ by, one of its amax before "
        "rounding and one after",
    ),
    Cause(
        "test_selective_attention_recompute",
        r"XPASS\(strict\)",
        "passes, where TE expects of Blackwell that it fails; attention is unfused here",
    ),
    Cause("nvfp4_gemm_exact.*row_scaled_gemm_matches_emulated", r"Mismatched elements: \d+ /", _SUMS),
    Cause(
        r"run_fsdp2_model.*NVFP4BlockScaling",
        r"not enough values to unpack \(expected 2, got 1\)",
        "shards over one rank, where torch's FSDP2 hands on the first of the tensors that TE gathers alone; of MXFP8 TE "
        "expects that failure",
    ),
    Cause(
        "test_fsdp2_model_tests",
        r"no error printed|TimeoutExpired",
        "fails with any test of those that it starts, or by one limit of 600 s for all of them, which two cores keep "
        "barely; distributed/fsdp2_tests/run_fsdp2_model has its tests one by one",
    ),
    Cause(
        "",
        _STOPPED,
        "**stopped** at the limit for a test, on two shared cores; whether it would pass is not known",
    ),
    Cause("", r"can't allocate memory", "needs more memory than it was lent"),
)
"""What was found out. The first row that fits is the cause; a group of the error's pattern stands in its words."""


def cause_of(file: str, test: str, line: str) -> str | None:
    """Return why this test failed, if it is known."""
    for cause in CAUSES:
        found = re.search(cause.error, line)
        if found and re.search(cause.test, f"{file}::{test}"):
            return cause.why.format(*found.groups()) + (" (ours to write)" if cause.ours else "")
    return None


def was_stopped(line: str) -> bool:
    """Return whether a test failed by the limit for a test."""
    return re.search(_STOPPED, line) is not None


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of the runs before, by architecture and file."""
    path = folder / DATA
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def join(folder: Path, arch: int, file: str, found: dict[str, Any]) -> None:
    """Put one file's results among those of the runs before, and draw the page."""
    path = folder / DATA
    results = rows(folder)
    results.setdefault(str(arch), {})[file] = found
    path.write_text(
        json.dumps({a: dict(sorted(results[a].items())) for a in sorted(results, reverse=True)}, indent=1) + "\n"
    )
    folder.joinpath(PAGE).write_text(page(results))


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    parts = (_counts(results), [""], _causes(results), _unexplained(results), _left_out(), _skips(results))
    return "\n".join([_HEAD, *(line for part in parts for line in part)]) + "\n"


_HEAD = """# TransformerEngine's own tests on the CPU implementation

Written by `tools/te_suite.py` from `te_suite.json`, which holds every failure by its name; do not edit. A row again, its whole file:

```text
.venv/bin/python tools/te_suite.py CHECKOUT --only FILE
```

CHECKOUT is a copy of TransformerEngine's public repository; of it only `tests/pytorch` is used, and TE itself is the wheel of 2.20.2.
*Tests of* is the version and the commit of that copy: d0067d0da is the head of `main` on 22 August 2026.
*Sample* is how many of a file's tests were run at most, chosen at random with seed 0 or the seed that it names (`--sample`, `--seed`), less
those with a word in their name (`--without`); *limits* are the seconds for the file and for a test. Tests of matrices with a side of 8192 or more are left out everywhere.
*Not reached* are tests that the file's limit cut off; `--rest` runs those alone, and those again that their own limit stopped, and adds to the row. Files of `distributed/fsdp2_tests` run on two ranks, and a test fails if it does on one.
The reference of test_float8_blockwise_gemm_exact has a Triton kernel for `x * s + y`, rounded once, in whose place the tool computes it (`fused_fma`).

`FILE+debug` is a file while TE's precision debug tool looks on, at every tensor, as TE's scripts run it. That and the files of `debug/` need its
package, and test_onnx_export others, which no environment of this project has. In a folder of their own they are found by `PYTHONPATH=FOLDER`:

```text
.venv/bin/python -m pip install --no-deps --target FOLDER nvdlfw-inspect onnxruntime onnxruntime-extensions flatbuffers pytest==8.2.1
```

That pytest is TE's own: four tests of debug/test_log hold a number to a tensor without dimensions, which pytest 9 takes for a sequence.
"""


def _counts(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| file | GPU | passed | failed | skipped | not reached | sample | limits | tests of | run on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    totals = {arch: [0, 0, 0] for arch in results}
    for file in sorted({file for files in results.values() for file in files}):
        for arch, files in results.items():
            if file in files:
                r = files[file]
                sums = [r["passed"], r["failed"], r["skipped"]]
                totals[arch] = [a + b for a, b in zip(totals[arch], sums, strict=True)]
                cells = [file.removesuffix(".py"), f"sm{arch}", *sums, r["not_reached"] or "", _taken(r)]
                cells += [f"{r['limit']}, {r['test_limit']}", _tree(r), r["date"]]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        f"| **all** | sm{arch} | {' | '.join(f'**{n}**' for n in sums)} | | | | | |" for arch, sums in totals.items()
    ]
    return lines


def _tree(found: dict[str, Any]) -> str:
    tested = found.get("tree") or {}
    return " ".join(part for part in (tested.get("version"), (tested.get("commit") or "")[:9]) if part)


def _left_out() -> list[str]:
    rows = (f"| {file.replace('*', chr(92) + '*')} | {why} |" for file, why in LEFT_OUT.items())
    return ["## Files that are not run", "", "| file | |", "|---|---|", *rows, ""]


def _taken(found: dict[str, Any]) -> str:
    words = [word for word in found["without"] if word not in ("8192", "16384")]
    seed = f", seed {found['seed']}" if found["sample"] and found.get("seed") else ""
    return f"{found['sample'] or 'all'}{seed}{', without ' + ', '.join(words) if words else ''}"


def _failures(results: dict[str, dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [
        (arch, file, test, line)
        for arch, files in results.items()
        for file, found in files.items()
        for test, line in found["failures"].items()
    ]


def _causes(results: dict[str, dict[str, Any]]) -> list[str]:
    by_cause: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for arch, file, test, line in _failures(results):
        cause = cause_of(file, test, line)
        if cause:
            by_cause[cause][file.removesuffix(".py")].append(arch)
    lines = ["## Failures whose cause is known", "", "| cause | tests |", "|---|---|"]
    for cause, files in sorted(by_cause.items(), key=lambda row: -sum(map(len, row[1].values()))):
        lines.append(f"| {cause} | {', '.join(f'{file} {len(archs)}' for file, archs in sorted(files.items()))} |")
    return [*lines, ""] if by_cause else []


def _unexplained(results: dict[str, dict[str, Any]]) -> list[str]:
    unknown = [row for row in _failures(results) if cause_of(row[1], row[2], row[3]) is None]
    if not unknown:
        return ["No failure is unexplained.", ""]
    lines = ["## Unexplained", ""]
    for arch, file, test, line in unknown:
        lines.append(f"- `{file}::{test}` (sm{arch}): {_plain(line)}")
    return [*lines, ""]


def _skips(results: dict[str, dict[str, Any]]) -> list[str]:
    reasons: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for arch, files in results.items():
        for found in files.values():
            for reason, n in found["skips"].items():
                reasons[_plain(reason.removeprefix("Skipped: "))][arch] += n
    lines = ["## Skipped, in TE's own words", "", "| reason | tests |", "|---|---|"]
    for reason, archs in sorted(reasons.items(), key=lambda row: -sum(row[1].values())):
        lines.append(f"| {reason} | {', '.join(f'{n} (sm{arch})' for arch, n in archs.items())} |")
    return lines if reasons else []


def _plain(text: str) -> str:
    """Return text that a table of Markdown can hold."""
    return re.sub(r"([|<>*_`])", r"\\\1", text[:240])
