"""The support table against TransformerEngine's own support checks, row by row.

``data/te_support_matrix.json`` holds what TE 2.3 to 2.20.2 itself answered under mocked GPUs and CUDAs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_fp8.errors import PrecisionError
from nemo_fp8.preflight.answers import answer, needs_of
from nemo_fp8.preflight.machine import Machine
from nemo_fp8.preflight.support import (
    CUBLAS,
    DECODED,
    EMULATED,
    GPU,
    NATIVE,
    NEEDS,
    RECIPES,
    ROUNDED,
    TE,
    TE_CHECK,
    UNKNOWN,
    UNSUPPORTED,
    WAYS,
)

MATRIX = json.loads((Path(__file__).parent / "data" / "te_support_matrix.json").read_text())
ROWS = [(te, *key.split("|"), row) for te, rows in MATRIX.items() for key, row in rows.items()]
# TE's check -> the recipes that it stands for. nvfp4 is not in TE before 2.8.
CHECKS = {
    "fp8": ("delayed", "tensorwise"),
    "mxfp8": ("mxfp8",),
    "fp8_block_scaling": ("blockwise",),
    "nvfp4": ("nvfp4",),
}
# Where this package knows better than TE's check: the GEMM fails although the check passes.
STRICTER = {GPU, CUBLAS}


def described(te: str, arch: str, cuda: str, **_: object) -> Machine:
    return Machine.parse(f"{arch},{cuda.replace('cu', 'cuda')},te{te},mcore0.15.3,nemo2.7.3")


def test_the_matrix_is_whole() -> None:
    assert len(ROWS) == 16 * 7 * 5
    assert {check for *_, row in ROWS for check in row} == set(CHECKS)


@pytest.mark.parametrize("te", MATRIX)
def test_every_row_of_te_itself(te: str) -> None:
    wrong = []
    for version, arch, cuda, row in ROWS:
        if version != te:
            continue
        machine = described(version, arch, cuda)
        for check, recipes in CHECKS.items():
            for recipe in recipes:
                mine = answer(recipe, machine, by=(TE_CHECK,))
                if (mine.verdict == NATIVE) != row.get(check, False):
                    wrong.append((version, arch, cuda, recipe, mine.verdict, mine.reason))
    assert not wrong


def test_the_whole_verdict_is_te_s_or_names_why_it_is_stricter() -> None:
    stricter = set()
    for te, arch, cuda, row in ROWS:
        machine = described(te, arch, cuda)
        for check, recipes in CHECKS.items():
            for recipe in recipes:
                mine = answer(recipe, machine)
                if mine.verdict == NATIVE:
                    assert row.get(check), (te, arch, cuda, recipe)
                elif row.get(check):
                    failing = [
                        n
                        for n in needs_of(TE, recipe)
                        if answer(recipe, machine, by=(n.by,)).verdict != NATIVE and n.by in STRICTER
                    ]
                    assert failing, (te, arch, cuda, recipe, mine)
                    stricter.add((recipe, arch, cuda))
    # Blackwell has no code in a CUDA before 12.8: nothing else is refused that TE lets pass.
    assert stricter
    assert {arch for _, arch, _ in stricter} == {"sm100", "sm103", "sm120"}
    assert {cuda for _, _, cuda in stricter} == {"cu12.4", "cu12.6"}


@pytest.mark.parametrize(
    ("words", "recipe", "verdict"),
    [
        ("h200,cuda12.8,te2.9", "blockwise", UNSUPPORTED),
        ("h200,cuda12.9,te2.9", "blockwise", NATIVE),
        ("h200,cuda12.10,te2.9", "blockwise", NATIVE),  # a version, not the number 12.1
        ("h200,cuda12.9,cublas12.8.4.1,te2.9", "blockwise", UNSUPPORTED),
        ("h200,torch2.10,te2.9", "blockwise", UNSUPPORTED),  # PyPI's torch 2.8 to 2.10 carry CUDA 12.8
        ("h200,torch2.7.1,te2.9", "blockwise", UNSUPPORTED),
        ("h200,torch2.11,te2.9", "blockwise", NATIVE),
        ("h200,torch2.8.0+cu129,te2.9", "blockwise", NATIVE),
        ("b200,cuda12.9,te2.8", "blockwise", UNSUPPORTED),
        ("b200,cuda12.9,te2.9", "blockwise", NATIVE),
        ("b200,cuda12.9,te2.10", "blockwise", NATIVE),  # 2.10 is after 2.9
        ("b200,cuda12.9,te2.9", "blockwise-fp32", UNSUPPORTED),
        ("h200,cuda12.9,te2.9", "blockwise-fp32", NATIVE),
        ("l40s,cuda12.9,te2.9", "blockwise", UNSUPPORTED),
        ("rtx5090,cuda12.9,te2.5", "mxfp8", NATIVE),
        ("rtx5090,cuda12.9,te2.6", "mxfp8", UNSUPPORTED),
        ("b200,cuda12.6,te2.9", "mxfp8", UNSUPPORTED),
        ("h100,cuda12.9,te2.9", "mxfp8", UNSUPPORTED),
        ("l4,cuda12.0,te2.9", "delayed", UNSUPPORTED),
        ("l4,cuda12.1,cublas12.1.2,te2.9", "tensorwise", UNSUPPORTED),
        ("l4,cuda12.1,cublas12.1.3,te2.9", "tensorwise", NATIVE),
        ("h100,cuda12.4,te2.1", "tensorwise", UNSUPPORTED),
        ("h100,cuda12.4,te2.9,mcore0.11", "tensorwise", UNSUPPORTED),
        ("h100,cuda12.9,te2.9,mcore0.12", "blockwise", UNSUPPORTED),
        ("h100,cuda12.9,te2.9,nemo2.3", "blockwise", UNSUPPORTED),
        ("h100,cuda12.9,no-te", "delayed", UNSUPPORTED),
        ("cpu,torch2.13", "blockwise", EMULATED),
        ("cpu,no-torch", "blockwise", UNSUPPORTED),
        ("a100", "delayed", UNSUPPORTED),
        ("h100", "rollout-fp8", NATIVE),
        ("h100,vllm0.27", "rollout-fp8", UNSUPPORTED),
        ("a100", "rollout-fp8", EMULATED),
        ("v100", "rollout-fp8", UNSUPPORTED),
        ("cpu,amx", "rollout-fp8", EMULATED),
        # Without AMX weights are decoded; and one scale a tensor stands in every block of the same kernels.
        ("cpu,avx512", "rollout-fp8", EMULATED),
        ("cpu,avx2", "rollout-fp8", EMULATED),
        ("cpu", "rollout-fp8", UNKNOWN),
        ("cpu,amx", "rollout-tensor", EMULATED),
        ("cpu,avx2", "rollout-tensor", EMULATED),
        ("cpu,avx2", "rollout-mxfp8", EMULATED),
        ("cpu,avx2,no-vllm", "rollout-fp8", UNSUPPORTED),
        ("cpu,avx2", "rollout-deepgemm", UNSUPPORTED),
        ("h100", "rollout-checkpoint", NATIVE),
        ("a100", "rollout-checkpoint", EMULATED),
        ("cpu,amx", "rollout-checkpoint", EMULATED),
        ("cpu,avx512", "rollout-checkpoint", UNSUPPORTED),
        ("cpu", "rollout-checkpoint", UNKNOWN),
        ("cpu", "kv-cache-fp8", UNKNOWN),
        ("cpu,amx", "kv-cache-fp8", NATIVE),
        ("cpu,avx512", "kv-cache-fp8", NATIVE),
        ("cpu,avx2", "kv-cache-fp8", EMULATED),
        ("a100", "kv-cache-fp8", UNKNOWN),
        ("h100", "rollout-deepgemm", NATIVE),
        ("b200", "rollout-deepgemm", NATIVE),
        ("rtx5090", "rollout-deepgemm", UNSUPPORTED),
        ("l40s", "rollout-deepgemm", UNSUPPORTED),
        ("b200", "rollout-mxfp8", NATIVE),
        ("rtx5090", "rollout-mxfp8", UNKNOWN),
        ("h200", "rollout-mxfp8", UNKNOWN),
    ],
)
def test_verdicts(words: str, recipe: str, verdict: str) -> None:
    assert answer(recipe, Machine.parse(words)).verdict == verdict


def test_a_cpu_without_amx_is_told_what_happens_at_which_price_and_what_does_not() -> None:
    machine = Machine.parse("cpu,avx2,vllm0.31")
    decoded = answer("rollout-fp8", machine)
    assert decoded.way == DECODED
    for words in (
        "from the codes for a few tokens, of decoded weights for more",
        "several times faster without units",
        "1.3 times its speed for one request and 3 times for eight without BF16 units",
    ):
        assert words in decoded.reason
    cache, checkpoint = answer("kv-cache-fp8", machine), answer("rollout-checkpoint", machine)
    assert cache.way == ROUNDED
    assert "rounded to FP8" in cache.reason
    assert "no memory is saved" in cache.reason
    assert "stay in BF16" in decoded.reason
    assert "needs AMX" in checkpoint.reason
    assert "Give the BF16 checkpoint" in checkpoint.remedy


def test_amx_or_not_is_one_question() -> None:
    assert answer("rollout-fp8", Machine.parse("cpu")).depends == ("a CPU with AMX",)


def test_no_vllm_is_not_said_to_be_the_cpu_s_fault() -> None:
    mine = answer("rollout-fp8", Machine.parse("cpu,avx2,no-vllm"))
    assert "AMX" not in mine.reason + mine.remedy
    assert "--vllm-python" in mine.remedy


def test_a_refusal_has_a_reason_and_a_remedy() -> None:
    for te, arch, cuda, _ in ROWS:
        for recipe in RECIPES:
            mine = answer(recipe, described(te, arch, cuda))
            assert mine.reason
            assert mine.verdict == NATIVE or mine.remedy, (recipe, te, arch, cuda)


def test_what_is_not_said_is_named_and_not_guessed() -> None:
    mine = answer("blockwise", Machine.parse("h200"))
    assert mine.verdict == UNKNOWN
    assert {"TransformerEngine >= 2.3", "CUDA >= 12.9", "cuBLAS >= 12.9"} <= set(mine.depends)
    assert "Before TE 2.9" not in mine.reason  # sm90 does not need it
    assert answer("blockwise", Machine.parse("h200,cuda12.8")).verdict == UNSUPPORTED  # decided without the rest
    assert answer("tensorwise", Machine.parse("h200,cuda12.8,te2.9")).depends == (
        "megatron-core >= 0.12",
        "NeMo >= 2.3",
    )


def test_an_unknown_architecture_depends_on_it() -> None:
    machine = Machine.parse("cuda13.0,te2.5")
    assert answer("mxfp8", machine).verdict == UNKNOWN
    assert any("sm" in words for words in answer("mxfp8", machine).depends)
    # Never native on CUDA 12.8: whether it is emulated is decided by there being a GPU.
    assert answer("blockwise", Machine.parse("cuda12.8,te2.9")).depends == ("no GPU",)


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(PrecisionError, match="Did you mean 'blockwise'"):
        answer("blockwize", Machine.parse("h200"))


def test_every_row_of_the_table_belongs_to_a_way_of_its_recipe() -> None:
    ways = {(way.name, recipe) for way in WAYS for recipe in way.recipes}
    for need in NEEDS:
        used = [recipe for recipe in need.recipes if (need.way, recipe) in ways]
        assert used, need
        assert set(need.recipes) <= set(RECIPES), need
    for way, recipe in ways:
        assert any(True for _ in needs_of(way, recipe)), (way, recipe)
