"""Run TransformerEngine's own tests on the CPU implementation of its extension, and say what passed.

    python tools/te_suite.py CHECKOUT [--arch 90|100] [--only FILE ...] [--sample N] [--limit SECONDS] [--json]

CHECKOUT is a copy of TransformerEngine's repository, of which only ``tests/pytorch`` is used; no file of it belongs to this project.
Each file runs in a process of its own, for each architecture that is stood for, and every failure is printed with its reason.
``--sample N`` takes N tests of each file, chosen by a fixed seed; ``--json`` prints the counts,
``{"files": {name: {"passed": n, "failed": n, "skipped": n}}}``. Tests of matrices with a side of 8192 or more are left out: minutes each.

As a pytest plugin (``-p te_suite``) the same file puts the implementation in place before a test imports TE.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = """
test_float8_blockwise_scaling_exact.py test_float8_blockwise_gemm_exact.py test_float8blockwisetensor.py
test_float8_current_scaling_exact.py
test_quantized_tensor.py test_recipe.py test_multi_tensor.py test_fused_optimizer.py test_partial_cast.py test_numerics.py test_sanity.py
test_backward_override.py test_custom_recipe.py test_fusible_ops.py test_hybrid_quantization.py test_identity_quantizer.py
test_grouped_linear.py test_fused_rope.py test_fused_router.py test_permutation.py test_parallel_cross_entropy.py test_qk_norm.py
test_gqa.py test_deferred_init.py test_mxfp8_2d_quantize.py mxfp8/test_mxfp8_dequantize_extreme_scales.py
mxfp8/test_mxfp8_master_weight_empty_shard.py mxfp8/test_mxfp8_quantize_swizzle_fusion.py mxfp8/test_mxfp8_group_quantize_graph_safe.py
nvfp4/test_nvfp4_quantize_exact.py nvfp4/test_nvfp4_rht_quantize_exact.py nvfp4/test_nvfp4_gemm_exact.py nvfp4/test_nvfp4_module_exact.py
nvfp4/test_nvfp4_sr_quantize.py nvfp4/test_nvfp4_group_quantize.py nvfp4/test_nvfp4_2d_quantize_swizzle_fusion.py
layernorm_mlp/test_selective_activation_checkpoint.py
""".split()
"""The files that need no second GPU, no CUDA graphs and no cuDNN."""

_SAMPLE, _ARCH = "TE_SUITE_SAMPLE", "TE_SUITE_ARCH"


# ---------------------------------------------------------------------- as a plugin


def pytest_configure(config: object) -> None:
    """Put the CPU implementation in place."""
    if _ARCH in os.environ:
        from nemo_fp8 import te_cpu

        te_cpu.install(int(os.environ[_ARCH]))


def pytest_collection_modifyitems(config: object, items: list[object]) -> None:
    """Keep a sample of the tests, the same one every time."""
    wanted = int(os.environ.get(_SAMPLE, "0"))
    if wanted and len(items) > wanted:
        kept = set(random.Random(0).sample(range(len(items)), wanted))
        items[:] = [item for i, item in enumerate(items) if i in kept]


# ---------------------------------------------------------------------- as a program


def run(checkout: Path, file: str, arch: int, sample: int, limit: int) -> dict[str, object]:
    """The counts of one file, with the reason of every test that failed."""
    folder = checkout / "tests" / "pytorch"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        path = os.pathsep.join([str(ROOT), str(ROOT / "tools"), str(folder), os.environ.get("PYTHONPATH", "")])
        settings = {"PYTHONPATH": path, _ARCH: str(arch), _SAMPLE: str(sample), "PYTHONDONTWRITEBYTECODE": "1"}
        options = [
            "-q",
            "-p",
            "te_suite",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "120",
            "--tb=line",
            f"--junitxml={report}",
            f"--rootdir={folder}",
        ]
        command = [sys.executable, "-m", "pytest", *options, "-k", "not 8192 and not 16384", str(folder / file)]
        with Path(scratch, "log.txt").open("w+") as log:
            try:
                subprocess.run(command, cwd=folder, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, timeout=limit)
            except subprocess.TimeoutExpired:
                return {"passed": 0, "failed": 0, "skipped": 0, "failures": {"(the file)": f"did not end within {limit} seconds"}}
            if not report.exists():
                log.seek(0)
                return {"passed": 0, "failed": 1, "skipped": 0, "failures": {"(the file)": log.read()[-400:]}}
        return counts(report)


def counts(report: Path) -> dict[str, object]:
    """What a report of pytest's says."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = {case.get("name", ""): found for case in cases for found in [*case.findall("failure"), *case.findall("error")]}
    skipped = sum(case.find("skipped") is not None for case in cases)
    reasons = {name: re.sub(r"\s+", " ", found.get("message") or found.text or "")[:200] for name, found in bad.items()}
    return {"passed": len(cases) - len(bad) - skipped, "failed": len(bad), "skipped": skipped, "failures": reasons}


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--arch", type=int, choices=(90, 100), action="append")
    parser.add_argument("--only", nargs="+", metavar="FILE")
    parser.add_argument("--sample", type=int, default=0, metavar="N")
    parser.add_argument("--limit", type=int, default=1800, metavar="SECONDS", help="for each file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    total: dict[str, dict[str, object]] = {}
    for file in arguments.only or FILES:
        for arch in arguments.arch or (100, 90):
            name = f"{file} (sm{arch})"
            total[name] = run(arguments.checkout, file if file.endswith(".py") else f"{file}.py", arch, arguments.sample, arguments.limit)
            found = total[name]
            print(f"{name}: {found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped", file=sys.stderr, flush=True)
            for test, reason in found["failures"].items():  # type: ignore[attr-defined]
                print(f"    {test}: {reason}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"files": total}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
