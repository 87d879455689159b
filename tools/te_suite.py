"""Run TransformerEngine's own tests on the CPU implementation of its extension, and say what passed.

    python tools/te_suite.py CHECKOUT [--arch 90|100] [--only FILE ...] [--sample N] [--seed N] [--without WORD ...]
                             [--limit S] [--test-limit S] [--rest] [--commit SHA] [--json] [--docs FOLDER]

CHECKOUT is a copy of TransformerEngine's repository, of which only ``tests/pytorch`` is used and the version told; no
file of it belongs to this project. Each file runs in a process of its own, with the variables that TE's scripts give
it, for each architecture that is stood for. Every test is written down as it ends, so a file that is stopped at its
limit reports what it got through; a test that hangs or takes its process with it has failed, and the file goes on after
it. ``--rest`` goes on where that limit cut a file off, runs tests again that their own limit stopped, with the sample,
seed and words that its row names, and adds to the row. ``--sample N`` takes N tests of each file, chosen by ``--seed``.
Tests with one of the words of ``--without`` in their name are left out: as a rule those of matrices with a side of 8192
or more, which take minutes each.

``FILE+debug`` is a file once more, while TE's debug tool looks on, as TE's scripts run two of them. That and the files
of ``debug/`` need ``nvdlfw-inspect``, and test_onnx_export needs ``onnxruntime``; neither belongs to this project's
environment, and either may lie in a folder on PYTHONPATH.

Each result says when it was found and on which tree: the version that the checkout names, and the commit of ``--commit``
or, in a clone, git's. The results join those of the runs before in ``te_suite.json``, and ``te_suite.md`` is drawn from
all of them. ``--json`` prints this run: ``{"files": {name: {"passed": n, "failed": n, "skipped": n}}}``, the sum over
the architectures that ran.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import te_suite_page
from te_suite_plugin import AFTER, AGAIN, RECORD, SAMPLE, SEED, end_children, events, name_of, take_orphans

ROOT = Path(__file__).resolve().parent.parent
FILES = """
test_float8_blockwise_scaling_exact.py test_float8_blockwise_gemm_exact.py test_float8blockwisetensor.py
test_float8_current_scaling_exact.py test_quantized_tensor.py test_recipe.py test_multi_tensor.py test_fused_optimizer.py
test_partial_cast.py test_numerics.py test_sanity.py test_backward_override.py test_custom_recipe.py
test_fusible_ops.py test_hybrid_quantization.py test_identity_quantizer.py test_grouped_linear.py test_grouped_mlp.py
test_grouped_tensor.py test_fused_rope.py test_fused_router.py test_permutation.py test_parallel_cross_entropy.py test_qk_norm.py
test_gqa.py test_deferred_init.py test_jit.py test_hf_integration.py test_mhc.py test_cpu_offloading.py test_distributed_weight.py
test_ops_grouped_linear_distributed_weight.py test_weight_swizzle_in_layers.py test_mxfp8_2d_quantize.py
mxfp8/test_mxfp8_dequantize_extreme_scales.py mxfp8/test_mxfp8_master_weight_empty_shard.py mxfp8/test_mxfp8_quantize_swizzle_fusion.py
mxfp8/test_mxfp8_group_quantize_graph_safe.py nvfp4/test_nvfp4_quantize_exact.py nvfp4/test_nvfp4_rht_quantize_exact.py
nvfp4/test_nvfp4_gemm_exact.py nvfp4/test_nvfp4_module_exact.py nvfp4/test_nvfp4_sr_quantize.py nvfp4/test_nvfp4_group_quantize.py
nvfp4/test_nvfp4_group_quantize_graph_safe.py nvfp4/test_nvfp4_2d_quantize_swizzle_fusion.py
nvfp4/test_nvfp4_rht_quantize_swizzle_fusion.py nvfp4/test_nvfp4_weight_swizzle_cache.py nvfp4/test_nvfp4_fsdp2_hooks.py
layernorm_mlp/test_selective_activation_checkpoint.py attention/test_attention.py attention/test_kv_cache.py
distributed/test_sanity.py distributed/test_fusible_ops.py distributed/test_cast_master_weights_to_fp8.py distributed/test_numerics.py
distributed/test_numerics_exact.py distributed/test_hybrid_tp_sp.py distributed/test_torch_fsdp2.py
distributed/fsdp2_tests/run_fsdp2_mem_leak.py distributed/fsdp2_tests/run_fsdp2_model.py
test_checkpoint.py test_hybrid_quantization_fsdp2.py test_cpu_offloading_v1.py attention/test_cp_utils.py
attention/test_cu_seqlens_cache.py attention/test_fused_mla_q_uproj.py attention/test_linear_mxfp8_attention.py
debug/test_sanity.py debug/test_config.py debug/test_numerics.py debug/test_log.py debug/test_api_features.py
debug/test_perf.py debug/test_distributed.py test_sanity+debug.py test_numerics+debug.py test_onnx_export.py
""".split()
"""What is run unless ``--only`` says otherwise. What is left out of TE's files, and why, is
:data:`te_suite_page.LEFT_OUT`."""
INSPECTED = "+debug"
"""How the name ends of a file that runs once more, under TE's debug tool with a feature that changes nothing."""
_LOOKS_ON = (
    "NVTE_TEST_NVINSPECT_ENABLED=1 NVTE_TEST_NVINSPECT_CONFIG_FILE={configs}dummy_feature.yaml "
    "NVTE_TEST_NVINSPECT_FEATURE_DIRS={features} PYTORCH_JIT=0 NVTE_TORCH_COMPILE=0 NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
)
VARIABLES = {
    "test_sanity.py": "NVTE_GROUPED_LINEAR_SINGLE_PARAM=1",
    "test_grouped_tensor.py": "NVTE_GROUPED_LINEAR_SINGLE_PARAM=1",
    "test_grouped_mlp.py": "NVTE_GROUPED_LINEAR_SINGLE_PARAM=1 NVTE_CUTEDSL_FUSED_GROUPED_MLP=1",
    "test_numerics.py": "PYTORCH_JIT=0 NVTE_TORCH_COMPILE=0 NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 NVTE_FUSED_ATTN=0",
    "test_grouped_linear.py": "PYTORCH_JIT=0 NVTE_TORCH_COMPILE=0",
    "test_ops_grouped_linear_distributed_weight.py": "PYTORCH_JIT=0 NVTE_TORCH_COMPILE=0",
    "test_cpu_offloading_v1.py": "NVTE_FLASH_ATTN=0 NVTE_CPU_OFFLOAD_V1=1",
    "test_mhc.py": "NVTE_DISABLE_TRITON_AUTOTUNING=1 NVIDIA_TF32_OVERRIDE=0",
    "attention/test_attention.py": "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1",
    "debug/test_api_features.py": "NVTE_TORCH_COMPILE=0",
    "test_sanity+debug.py": f"{_LOOKS_ON} NVTE_GROUPED_LINEAR_SINGLE_PARAM=1",
    "test_numerics+debug.py": f"{_LOOKS_ON} NVTE_FUSED_ATTN=0",
    "test_onnx_export.py": "NVTE_UnfusedDPA_Emulate_FP8=1",
}
"""What TE's own scripts (``qa/*_pytorch_*unittest/test.sh``) set for a file."""
OPTIONS = {"debug/": ("--feature_dirs={features}", "--configs_dir={configs}")}
"""Options that TE's scripts give pytest for the files of a folder."""
BEFORE = {"test_checkpoint.py": ("--save-checkpoint", "all")}
"""Files that TE's script first runs as a program, with these arguments: it writes what the tests read."""

ARCHITECTURES = (100, 90)
OUTCOMES = ("passed", "failed", "skipped")
NOTHING = "(the file)"
"""The failure of a file of which no test ended."""
TOO_LARGE = ("8192", "16384")
_RANKS = "2"
_START_RANKS = ("distributed/", "debug/test_distributed")
"""Files whose tests start ranks: as many as they find GPUs."""
_OF_RANKS = "distributed/fsdp2_tests/"
"""Files whose tests every rank runs, under torchrun; TE's test_torch_fsdp2 starts each whole, as one test of 600 s."""
_LAUNCHER = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}", "--local-ranks-filter=0")


@dataclass(frozen=True)
class Limits:
    """How much of a file is run: tests at random (0 is all), seconds for the file, seconds for a test, words of names
    to leave out, what the choice at random begins with, how many of the chosen tests were run before, and which of
    those are run again."""

    sample: int
    file: int
    test: int
    without: tuple[str, ...] = TOO_LARGE
    seed: int = 0
    after: int = 0
    again: tuple[str, ...] = ()

    def rest_of(self, row: dict[str, Any], file: str, tested: dict[str, str | None]) -> Limits | None:
        """Return these limits for what a row did not reach, and what was stopped; None where that is nothing."""
        again = tuple(test for test, line in row.get("failures", {}).items() if te_suite_page.was_stopped(line))
        if not (row.get("not_reached") or again):
            return None
        if row.get("tree") != tested:
            raise SystemExit(f"{file}: its row is of another tree, {row.get('tree')}; without --rest, it is run anew")
        ended = sum(row[outcome] for outcome in OUTCOMES) - (NOTHING in row["failures"])
        taken = {"sample": row["sample"], "seed": row.get("seed", 0), "without": tuple(row["without"])}
        return replace(self, **taken, after=ended, again=again)


def run(checkout: Path, file: str, arch: int, limits: Limits) -> dict[str, Any]:
    """Run the tests of one file; return their counts, and why tests failed or were skipped."""
    folder = checkout / "tests" / "pytorch"
    end = time.monotonic() + limits.file
    with tempfile.TemporaryDirectory() as scratch:
        record, log = Path(scratch, "record.jsonl"), Path(scratch, "log.txt")
        settings = Path(scratch, "pytest.ini")  # of its own, so that no project's around the checkout is found
        settings.write_text("[pytest]\n")
        environment = _environment(folder, file, arch, limits, record)
        options = [
            "-q",
            "-p",
            "te_suite_plugin",
            "-p",
            "no:cacheprovider",
            "-c",
            str(settings),
            f"--rootdir={folder}",
            "--tb=short",
        ]
        command = [sys.executable, *(_LAUNCHER if file.startswith(_OF_RANKS) else ()), "-m", "pytest", *options]
        command += [f"--timeout={limits.test}", str(folder / file.replace(INSPECTED, ""))]
        for start, more in OPTIONS.items():
            command += [option.format(**_debug_tool(folder)) for option in more if file.startswith(start)]
        if limits.without:
            command += ["-k", " and ".join(f"not {word}" for word in limits.without)]
        if file in BEFORE:
            _prepare([sys.executable, str(folder / file), *BEFORE[file]], folder, environment, log, limits.file)
        while True:
            before = len(events(record))
            stopped = _watch(command, folder, environment, log, record, end, limits.test)
            found = events(record)
            hanging = _unfinished(found)
            if stopped != "at its limit" and hanging:
                _fail(record, hanging, f"the process {stopped}")
            if stopped == "at its limit" or not hanging or len(found) == before:
                break
        return summary(events(record), limits, stopped, log.read_text(errors="replace"))


def _environment(folder: Path, file: str, arch: int, limits: Limits, record: Path) -> dict[str, str]:
    path = [ROOT, ROOT / "tools", ROOT / "tools" / "te_suite_site", folder, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        # tests start torchrun by its name
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "TE_SUITE_ARCH": str(arch),
        SAMPLE: str(limits.sample),
        SEED: str(limits.seed),
        AFTER: str(limits.after),
        AGAIN: json.dumps(limits.again),
        RECORD: str(record),
        "NVTE_TEST_CHECKPOINT_ARTIFACT_PATH": str(record.parent / "artifacts"),
        **dict(setting.split("=") for setting in VARIABLES.get(file, "").format(**_debug_tool(folder)).split()),
        **({"LOCAL_WORLD_SIZE": _RANKS} if file.startswith(_START_RANKS) else {}),
    }


def _debug_tool(folder: Path) -> dict[str, str]:
    """Return where the features of TE's debug tool lie, which are TE's own, and what its tests ask of them."""
    found = importlib.util.find_spec("transformer_engine")
    te = Path(found.origin).parent if found and found.origin else Path()
    return {"features": str(te / "debug" / "features"), "configs": f"{folder / 'debug' / 'test_configs'}{os.sep}"}


def _prepare(command: list[str], folder: Path, environment: dict[str, str], log: Path, limit: int) -> None:
    """Run a file as a program. Where that fails, so do the tests that read what it should have written, and the log
    says why."""
    with _running(command, folder, environment, log) as process, contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit)


def _watch(
    command: list[str], folder: Path, environment: dict[str, str], log: Path, record: Path, end: float, test_limit: int
) -> str:  # fmt: skip
    """Run it, and say how it ended. pytest stops a slow test itself; what does not listen to it is stopped here, a
    little later."""
    with _running(command, folder, environment, log) as process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return f"ended with {process.wait(timeout=0.2)}"
            if time.monotonic() > end:
                return "at its limit"
            if _unfinished(events(record)) and time.time() - record.stat().st_mtime > 1.2 * test_limit + 5:
                return f"did not answer within {test_limit} s"


@contextlib.contextmanager
def _running(
    command: list[str], folder: Path, environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command whose words go to the log; end it, and the ranks that it left behind, at the context's end."""
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()  # torchrun ends its ranks, which are not of its group
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_children()  # ranks of a test that was cut off, whose launcher died with pytest


def _unfinished(found: list[dict[str, Any]]) -> str | None:
    """Return the test that began last, unless it has ended."""
    begun = [event["begins"] for event in found if "begins" in event]
    return begun[-1] if begun and all(event.get("ends") != begun[-1] for event in found) else None


def _fail(record: Path, test: str, line: str) -> None:
    with record.open("a") as file:
        file.write(json.dumps({"ends": test, "outcome": "failed", "line": line}) + "\n")


def summary(found: list[dict[str, Any]], limits: Limits, stopped: str, log: str) -> dict[str, Any]:
    """Return what a record says. A file of which nothing is known has failed."""
    outcomes: dict[str, tuple[str, str]] = {}
    for event in found:
        if "ends" in event and (event["outcome"] == "failed" or event["ends"] not in outcomes):
            outcomes[event["ends"]] = (event["outcome"], event["line"])
    selected = max([event["collected"] for event in found if "collected" in event], default=0)
    if not outcomes:
        why = (
            f"nothing ended within {limits.file} s"
            if stopped == "at its limit"
            else f"no test ran: {' '.join(log.split())[-400:]}"
        )
        outcomes[NOTHING] = ("failed", why)
    counts = Counter(outcome for outcome, _ in outcomes.values())
    return {
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        "not_reached": max(0, selected - len(outcomes)) if stopped == "at its limit" else 0,
        "sample": limits.sample,
        "seed": limits.seed,
        "limit": limits.file,
        "test_limit": limits.test,
        "without": list(limits.without),
        "failures": {name_of(test): line for test, (outcome, line) in outcomes.items() if outcome == "failed"},
        "skips": dict(Counter(line for outcome, line in outcomes.values() if outcome == "skipped").most_common()),
    }


def added(row: dict[str, Any], rest: dict[str, Any], again: Collection[str] = ()) -> dict[str, Any]:
    """Return a row with what of its file was run afterwards, and with what was run again in the place of what it was
    before."""
    sums = {key: row[key] + rest[key] for key in (*OUTCOMES, "limit")}
    failures = {test: line for test, line in row["failures"].items() if test not in (NOTHING, *again)}
    skips = Counter(row["skips"]) + Counter(rest["skips"])
    sums["failed"] -= len(row["failures"]) - len(failures)
    return rest | sums | {
        "test_limit": max(row["test_limit"], rest["test_limit"]),
        "failures": failures | rest["failures"],
        "skips": dict(skips.most_common()),
    }  # fmt: skip


def tree(checkout: Path, commit: str | None) -> dict[str, str | None]:
    """Return which version of TE's tests a checkout holds, and its commit as far as it is known."""
    version = checkout / "build_tools" / "VERSION.txt"
    if commit is None and (checkout / ".git").exists():
        asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return {"version": version.read_text().strip() if version.exists() else None, "commit": commit}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append")
    parser.add_argument("--only", nargs="+", metavar="FILE")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="tests of each file (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sample (default: %(default)s)")
    parser.add_argument(
        "--without",
        nargs="*",
        default=TOO_LARGE,
        metavar="WORD",
        help="leave out tests so named (default: %(default)s)",
    )
    parser.add_argument(
        "--limit", type=int, default=1800, metavar="SECONDS", help="for each file (default: %(default)s)"
    )
    parser.add_argument(
        "--test-limit", type=int, default=120, metavar="SECONDS", help="for each test (default: %(default)s)"
    )
    parser.add_argument("--rest", action="store_true", help="go on with the rows that a limit cut off")
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", metavar="FOLDER", help="where te_suite.json and te_suite.md lie"
    )
    parser.add_argument("--commit", metavar="SHA", help="of CHECKOUT, where it is no clone that git could ask")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    limits = Limits(arguments.sample, arguments.limit, arguments.test_limit, tuple(arguments.without), arguments.seed)
    take_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it has started, as Ctrl-C does
    arguments.docs.mkdir(parents=True, exist_ok=True)  # before anything runs for an hour
    checkout = arguments.checkout.resolve()
    tested = tree(checkout, arguments.commit)
    total: dict[str, dict[str, int]] = {}
    for name in arguments.only or FILES:
        file = name if name.endswith(".py") else f"{name}.py"
        for arch in arguments.arch or ARCHITECTURES:
            row = te_suite_page.rows(arguments.docs).get(str(arch), {}).get(file, {}) if arguments.rest else {}
            what = limits.rest_of(row, file, tested) if arguments.rest else limits
            if what is None:
                print(f"{file} (sm{arch}): no row that was cut off", file=sys.stderr, flush=True)
                continue
            found = {"date": date.today().isoformat(), "tree": tested} | run(checkout, file, arch, what)
            if arguments.rest:
                ended = sum(found[outcome] for outcome in OUTCOMES)
                if NOTHING in found["failures"] or ended < len(what.again):
                    why = found["failures"].get(NOTHING, "not all that was to be run again has ended")
                    print(f"{file} (sm{arch}): {why}", file=sys.stderr, flush=True)
                    continue
                found = added(row, found, what.again)
            te_suite_page.join(arguments.docs, arch, file, found)
            counts = total.setdefault(name, dict.fromkeys(OUTCOMES, 0))
            for outcome in counts:
                counts[outcome] += found[outcome]
            told = ", ".join(f"{found[key]} {key.replace('_', ' ')}" for key in (*counts, "not_reached"))
            print(f"{file} (sm{arch}): {told}", file=sys.stderr, flush=True)
            for test, line in found["failures"].items():
                print(f"    {test}: {te_suite_page.cause_of(file, test, line) or line}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"files": total}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
