"""The golden vectors through TE's own quantizers over our extension: codes and scales, in each copy that a tensor
keeps, and the state of delayed scaling."""

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from golden import ROLES, Differences, Golden, files
from support.te_cases import ARCH
from support.te_layouts import copies

GOLDEN = [Golden.load(path) for path in files()]
DTYPES = {"e4m3": te.DType.kFloat8E4M3, "e5m2": te.DType.kFloat8E5M2}


def runs_here(operand):
    """Whether this architecture has such scales: those of blocks are E8M0 or powers of two from Blackwell on."""
    scale = operand.get("scale")
    return scale != "e8m0" if ARCH < 100 else scale != "fp32" or operand["block"] is None


def of_kind(kind):
    return [
        pytest.param(golden, case, id=case["name"])
        for golden in GOLDEN
        for case in golden.cases
        if case["kind"] == kind and runs_here(case.get("operand") or {})
    ]


def quantizer_of(operand):
    """TE's quantizer of an operand, for both usages."""
    dtype, pow2 = DTYPES[operand["format"]], operand["scale"] == "pow2"
    if operand["block"] is None:
        return te.Float8CurrentScalingQuantizer(dtype, device=torch.device("cpu"), force_pow_2_scales=pow2)
    if operand["scale"] == "e8m0":
        return te.MXFP8Quantizer(dtype)
    dimensions = 2 if operand["block"] == [128, 128] else 1
    return te.Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=True, force_pow_2_scales=pow2, block_scaling_dim=dimensions
    )


@pytest.mark.parametrize(("golden", "case"), of_kind("quantize"))
def test_codes_and_scales(golden, case):
    """What serves both usages, a scale of the whole tensor or of square blocks, is recorded once."""
    name, operand, found = case["name"], case["operand"], Differences()
    quantized = quantizer_of(operand)(golden.tensors[f"inputs/{case['input']}"])
    both = operand["block"] is None or operand["block"][0] == operand["block"][1]
    kept = {usage: copy for usage, copy in copies(quantized).items() if both or usage == case["usage"]}
    assert kept["row" if both else case["usage"]] is not None
    assert not both or (kept["col"] is None) == (operand["block"] is None and ARCH >= 100)
    for usage, copy in kept.items():
        if copy is not None:
            found.hold("codes", f"{name}, {usage}", copy[0], golden.tensors[f"{name}/codes"])
            found.hold("scales", f"{name}, {usage}", copy[1], golden.tensors[f"{name}/scale_inv"])
    assert found.total == 0, str(found)


@pytest.mark.parametrize(("golden", "case"), of_kind("delayed"))
def test_delayed_scales_and_histories(golden, case):
    """The amaxes that TE's quantizer leaves, their maximum over the ranks, and TE's update of what it scales by."""
    found = Differences()
    scales = {d: torch.ones(len(roles)) for d, roles in ROLES.items()}
    histories = {d: torch.zeros(case["history_len"], len(roles)) for d, roles in ROLES.items()}
    for step in range(case["steps"]):
        for direction, roles in ROLES.items():
            dtype = DTYPES["e5m2" if direction == "backward" and case["format"] == "hybrid" else "e4m3"]
            reduced = torch.zeros(len(roles))
            for slot, role in enumerate(roles):
                for rank in range(case["ranks"]):
                    key = f"{case['name']}/{step}/{rank}/{role}"
                    amax = torch.zeros(1)
                    quantizer = te.Float8Quantizer(scales[direction][slot : slot + 1].clone(), amax, dtype)
                    quantized = copies(quantizer(golden.tensors[f"inputs/delayed/{step}/{rank}/{role}"]))
                    reduced[slot] = torch.maximum(reduced[slot], amax[0])
                    recorded = {
                        "amax": [amax.reshape(())],
                        "codes": [copy[0] for copy in quantized.values() if copy is not None],
                        "scale_inv": [copy[1] for copy in quantized.values() if copy is not None],
                    }
                    for what, ours in recorded.items():
                        for one in ours if f"{key}.{what}" in golden.tensors else ():
                            found.hold(what, key, one, golden.tensors[f"{key}.{what}"])
            histories[direction][0] = reduced
            tex.fused_amax_and_scale_update_after_reduction(
                reduced, [histories[direction]], [scales[direction]], case["algo"], dtype, case["margin"]
            )
            at = f"{case['name']}/{step}/{direction}"
            found.hold("scales", at, scales[direction], golden.tensors[f"{at}.scale"])
            found.hold("histories", at, histories[direction], golden.tensors[f"{at}.history"])
    assert found.total == 0, str(found)


def test_one_changed_bit_is_found():
    golden, case = next(p.values for p in of_kind("quantize") if p.values[1]["name"].startswith("128x128"))
    changed = Golden(golden.about, golden.cases, golden.tensors | {})
    codes = changed.tensors[f"{case['name']}/codes"].clone()
    codes[5, 7] ^= 1
    changed.tensors[f"{case['name']}/codes"] = codes
    with pytest.raises(AssertionError, match=r"2 of .* codes differ, .* codes\[5, 7\] is"):  # in either copy
        test_codes_and_scales(changed, case)
