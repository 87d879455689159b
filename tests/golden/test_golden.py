"""nemo_fp8.numerics, held bit for bit to what TransformerEngine made of the same inputs; the vectors lie in files
beside this one.

``te_python_reference`` is what TE's own Python makes, which runs anywhere. What TE's CUDA kernels make is in the
others, from an H100, by ``make gpu PART=conformance``; MXFP8 needs a Blackwell, and is held to as soon as its file lies
here.
"""

from __future__ import annotations

import pytest
import torch
from golden import FOLDER, Golden, files, hold

FILES = files()
GOLDEN = {path.stem: Golden.load(path) for path in FILES}
CASES = [
    pytest.param(stem, case, id=f"{stem}:{case['name']}") for stem, golden in GOLDEN.items() for case in golden.cases
]
KERNELS = {stem for stem, golden in GOLDEN.items() if "CUDA kernels" in golden.about["source"]}


@pytest.mark.parametrize(("stem", "case"), CASES)
def test_numerics_equal_the_recording(stem, case):
    found = hold(GOLDEN[stem], case)
    assert sum(found.compared.values()) > 0
    assert found.total == 0, str(found)


def test_the_recordings_of_tes_python_are_here():
    golden = GOLDEN["te_python_reference"]
    assert "its Python reference" in golden.about["source"]
    kinds = {(c["kind"], str((c.get("operand") or c)["format"])) for c in golden.cases}
    assert kinds >= {("quantize", "e4m3"), ("quantize", "e5m2"), ("delayed", "hybrid")}
    blocks = {
        (str(c["operand"]["block"]), c["operand"]["scale"], c["usage"]) for c in golden.cases if c["kind"] == "quantize"
    }
    assert {
        ("[1, 128]", "fp32", "col"),
        ("[1, 128]", "pow2", "row"),
        ("[128, 128]", "fp32", "row"),
        ("None", "pow2", "row"),
    } <= blocks


def test_the_recordings_of_tes_kernels_are_here():
    assert {"tensorwise", "blockwise_fp32", "blockwise_pow2", "delayed"} <= KERNELS, "make gpu PART=conformance"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_small(path):
    assert path.stat().st_size < 1 << 20


@pytest.mark.parametrize("what", ["codes", "scale_inv"])
def test_one_changed_bit_is_found(what):
    golden = Golden.load(FOLDER / "te_python_reference.safetensors")
    case = next(c for c in golden.cases if c["name"].startswith("1x128.fp32"))
    key = f"{case['name']}/{what}"
    golden.tensors[key] = changed = golden.tensors[key].clone()
    changed[3].view(torch.uint8)[0] ^= 1
    found = hold(golden, case)
    assert found.total == 1
    assert f"{'codes' if what == 'codes' else 'scales'}[3, " in found.first


def test_a_changed_history_is_found():
    golden = Golden.load(FOLDER / "te_python_reference.safetensors")
    case = next(c for c in golden.cases if c["kind"] == "delayed")
    golden.tensors[f"{case['name']}/2/forward.history"][3, 0] *= 1.5
    found = hold(golden, case)
    assert found.total == 2  # on either rank
    assert "delayed.0/2/forward: histories[3, 0]" in found.first
