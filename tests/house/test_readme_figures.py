"""The README's table of what was measured says what the records say: a record that is written again without it fails
here, with the words that belong there."""

import json
import re
from statistics import median

import pytest
from support import ROOT

from benchmarks.gpu.parts import runs

BENCHMARKS = ROOT / "docs" / "benchmarks"


def _record(name):
    return json.loads((BENCHMARKS / name).read_text())


def step_times():
    """Steps of tiny_llama over BF16's: the least and the most of FP8's recipes, and NVFP4's, by instruction set."""
    told = {}
    for run in _record("speed.json"):
        ratios = {row["recipe"]: row["ratio"] for row in run["rows"] if row["model"] == "tiny"}
        if ratios:
            fp8 = [ratio for recipe, ratio in ratios.items() if recipe not in ("bf16", "nvfp4")]
            told[run["isa"]] = (min(fp8), max(fp8), ratios["nvfp4"])
    native, kept = (told.pop("AVX2"), *told.values())[::-1]
    return (
        f"{native[0]:.2f} to {native[1]:.2f} times in FP8, {native[2]:.2f} in NVFP4; kept to AVX2 {kept[0]:.2f} to "
        f"{kept[1]:.2f}, and {kept[2]:.2f}"
    )


def suite():
    """TE's own tests, passed and failed on either stand-in."""
    counts = {
        arch: [sum(file[how] for file in files.values()) for how in ("passed", "failed")]
        for arch, files in json.loads((ROOT / "docs" / "te_suite.json").read_text()).items()
    }
    (passed, failed), (on_hopper, failed_there) = counts["100"], counts["90"]
    return f"{passed:,} passed and {failed} failed as Blackwell, {on_hopper:,} and {failed_there} as Hopper"


def pushes():
    """Times of pushes over one another."""
    refit = _record("refit.json")
    wall = {name: times["wall"] for name, times in refit["best"].items()}
    fp8, reload = wall["FP8 push"], wall["vLLM's own reload, FP8"]
    return (
        f"{fp8 / wall['BF16 push']:.2f} times, 1/{refit['start_seconds']['FP8'] / fp8:.0f} of an engine start, "
        f"{fp8 / reload:.2f} of vLLM's own reload, and {wall['FP8 push from shared memory'] / reload:.2f} from shared "
        f"memory; of changes alone over HTTP {refit['http']['changes'] / refit['http']['push']:.2f} of one of "
        f"everything, {wall['FP8 push of changes'] / fp8:.2f} through shared memory"
    )


def pushes_by_rows():
    """Times of pushes of BF16 that is multiplied by rows, over those of BF16 that vLLM packs, and of its own reload of
    the former."""
    refit = _record("refit.json")
    wall = {name: times["wall"] for name, times in refit["best"].items()}
    rows, shared = "BF16 by rows push", "BF16 by rows push from shared memory"
    reload = "vLLM's own reload, BF16 by rows"
    return (
        f"{wall[rows] / wall['BF16 push']:.2f} times, {wall[rows] / wall[reload]:.2f} of vLLM's own reload by rows; "
        f"from shared memory {wall[shared] / wall[reload]:.2f}, {refit['copy_seconds'] / wall[shared]:.0%} of a copy"
    )


def _cells(size, row):
    """Shares of a copy of a row of the quantizer's page, without and with statistics: natively, and kept to AVX2."""
    found = []
    for part in (BENCHMARKS / "quantize.md").read_text().split("\n# "):
        if match := re.search(rf"^## {size}\n.*?^\| {re.escape(row)} \| (.*?) \|$", part, re.MULTILINE | re.DOTALL):
            cells = [cell.strip() for cell in match[1].split("|")]
            found.append((cells[3], cells[6]))
    assert len(found) == 2, f"{row} is not in both parts of the page"
    return found


def fp8_casts():
    """A weight's cast to blocks."""
    (plain, counted), (kept, kept_counted) = _cells("8192 x 28672", "weight 128x128, FP32 scales")
    return f"{plain} of a copy; with statistics {counted}; the AVX2 build {kept} and {kept_counted}"


def fp4_casts():
    """NVFP4's cast, its amax included."""
    rows, squares = (_cells("4096 x 4096", f"NVFP4 {block}") for block in ("1x16", "16x16"))
    return f"1x16 {rows[0][0]} of a copy, 16x16 {squares[0][0]}; the AVX2 build {rows[1][0]} and {squares[1][0]}"


def on_an_h100():
    """Codes and scales of TE's kernels that were compared with ours there, and with a CPU's; none may differ."""
    measures = _record("gpu_conformance.json")["measures"]
    recorded = [m["result"]["compared"] for name, m in measures.items() if name.startswith("golden") and "result" in m]
    beside = [found for found in measures["TE beside us"]["result"].values() if "compared" in found]
    assert not any(counts["different"] for on in recorded for counts in on.values())
    assert not any(sum(found["different"].values()) for found in beside)
    codes, scales = (
        sum(on["cuda"][what] for on in recorded) + sum(found["compared"][what] for found in beside)
        for what in ("codes", "scales")
    )
    on_a_cpu = sum(on["cpu"]["codes"] for on in recorded)
    return f"none of {codes:,} codes and {scales:,} scales differs, nor of {on_a_cpu:,} codes of a CPU"


def _speeds_on_an_h100(model):
    """Each case of a model, as its speed over BF16's in the same run."""
    speeds = {}
    for run in runs(_record("gpu_train.json")):
        times = {
            name.removeprefix(f"{model}: "): median(m["result"]["ms"][20:])
            for name, m in run["measures"].items()
            if name.startswith(f"{model}: ") and "result" in m
        }
        speeds |= {name: times["bf16"] / ms for name, ms in times.items() if name != "bf16"}
    fp8 = [speed for name, speed in speeds.items() if "FP8 weights" not in name]
    return f"{min(fp8):.2f} to {max(fp8):.2f} times as fast in FP8 as in BF16; with FP8 weights, too,", speeds


def steps_on_an_h100():
    """Steps of the Llama slice; with FP8 weights in blocks, and with those that have one scale."""
    said, speeds = _speeds_on_an_h100("llama")
    blocks, *one = (f"{speeds[f'{name}, FP8 weights']:.2f}" for name in ("blockwise pow2", "tensorwise", "delayed"))
    (one_scale,) = {*one}
    cause = "[for which there is a cause](docs/quickstart.md#in-a-nemo-recipe)"
    return f"{said} {blocks} in blocks and {one_scale} with one scale for a tensor, {cause}"


def steps_with_experts_on_an_h100():
    """Steps of the Qwen3-MoE slice; with FP8 weights, too."""
    said, speeds = _speeds_on_an_h100("moe")
    weights = [speed for name, speed in speeds.items() if "FP8 weights" in name]
    return f"{said} {min(weights):.2f} to {max(weights):.2f}"


def refit_on_an_h100():
    """Ways of a refit as shares of a copy."""
    ways = _record("gpu_refit.json")["measures"]["8B"]["result"]["ways"]
    shares = {name: ways["copy"]["ms"] / ways[name]["ms"] for name in ("straight", "through buffers")}
    return f"{shares['straight']:.0%} of a copy, {shares['through buffers']:.0%} through buffers"


GPU = [on_an_h100, steps_on_an_h100, steps_with_experts_on_an_h100, refit_on_an_h100]


@pytest.mark.parametrize("figure", [step_times, suite, pushes, pushes_by_rows, fp8_casts, fp4_casts, *GPU])
def test_a_figure_is_its_record_s(figure):
    assert f"| {figure()} |" in (ROOT / "README.md").read_text()
