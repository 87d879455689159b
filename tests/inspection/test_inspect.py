"""What inspect measures equals what a few plain lines compute; FP8, activations and experts included."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_llama import FFN, HIDDEN, LAYERS, llama, write_shards

import nemo_fp8
from nemo_fp8.contract.presets import preset
from nemo_fp8.errors import PrecisionError
from nemo_fp8.inspection.advice import advise
from nemo_fp8.inspection.loss import BLOCKS, Loss
from nemo_fp8.inspection.measure import inspect_checkpoint, measure
from nemo_fp8.numerics import quantize
from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.modelopt import amax_of, four_bits
from nemo_fp8.numerics.nvfp4_tensor import QuantizedNVFP4
from nemo_fp8.numerics.quantize import quantize_reference
from nemo_fp8.storage.safetensors import Checkpoint

BLOCKWISE = preset("bf16_with_fp8_blockwise_mixed")
RECIPES = {
    "delayed": preset("bf16_with_fp8_delayed_mixed"),
    "tensorwise": preset("bf16_with_fp8_tensorwise_mixed"),
    "blockwise": BLOCKWISE,
    "blockwise-fp32": BLOCKWISE.replace(weight_scale="fp32", activation_scale="fp32"),
    "mxfp8": preset("bf16_with_mxfp8_mixed"),
}
NVFP4 = preset("bf16_with_nvfp4_mixed")


def _snr(signal, noise):
    return 10 * math.log10(signal / noise) if noise else math.inf


def _expected(x, operand, block):
    """SNR of all, the SNR that 99% of the blocks reach, underflow and MSE, in double precision and plain loops."""
    codes, scale_inv, _ = quantize_reference(x, operand.block, format_of(operand.format), operand.scale)
    values = nemo_fp8.numerics.Quantized(codes, scale_inv, operand.block).dequantize_reference().double()
    x = x.double()
    rows, columns = block
    pairs = []
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            a, b = x[i : i + rows, j : j + columns], values[i : i + rows, j : j + columns]
            pairs.append((float(a.square().sum()), float((a - b).square().sum())))
    of_blocks = sorted(_snr(*pair) for pair in pairs if pair[0])
    zeroed = int(((values == 0) & (x != 0)).sum())
    error = float((x - values).square().sum())
    return _snr(float(x.square().sum()), error), of_blocks[len(of_blocks) // 100], zeroed, error / x.numel()


@pytest.mark.parametrize("label", RECIPES)
@pytest.mark.parametrize("kind", ["weight", "input", "grad"])
@pytest.mark.parametrize("shape", [(300, 200), (130, 1100)])
def test_a_loss_is_what_a_few_plain_lines_compute(label, kind, shape):
    generator = torch.Generator().manual_seed(1)
    x = (
        torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 2, (shape[0], 1), generator=generator))
    ).bfloat16()
    operand = replace(RECIPES[label].operand(kind), delayed=False)
    loss = Loss.of(x, quantize(x, operand, statistics=True), BLOCKS[kind])
    snr, of_blocks, underflow, mse = _expected(x, operand, BLOCKS[kind])
    assert loss.snr_db == pytest.approx(snr, abs=1e-3)
    assert loss.block_snr_db == pytest.approx(of_blocks, abs=1e-3)
    assert loss.underflow == underflow
    assert loss.mse == pytest.approx(mse, rel=1e-4)
    assert loss.elements == x.numel()


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_the_snr_of_blocks_does_not_depend_on_magnitude(magnitude):
    x = torch.randn(256, 256) * magnitude
    operand = RECIPES["tensorwise"].operand("weight")
    loss = Loss.of(x, quantize(x, operand, statistics=True), (128, 128))
    assert 28 < loss.block_snr_db < 35


def test_nan_and_infinity_are_counted_and_enter_no_snr():
    x = torch.randn(256, 256)
    clean = Loss.of(x, quantize(x, BLOCKWISE.operand("weight"), statistics=True), (128, 128))
    x[3, 5], x[200, 7] = float("nan"), float("inf")
    for label in RECIPES:
        operand = RECIPES["tensorwise" if label == "delayed" else label].operand("weight")
        loss = Loss.of(x, quantize(x, operand, statistics=True), (128, 128))
        assert loss.nonfinite == 2
        assert math.isfinite(loss.mse)
        assert not math.isnan(loss.block_snr_db)
        assert all(value is None or math.isfinite(value) for value in loss.to_dict().values())
    assert clean.nonfinite == 0


def test_a_tensor_with_an_infinity_is_named(tmp_path):
    tensors = llama()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    found = inspect_checkpoint(write_shards(tmp_path / "broken", tensors), RECIPES)
    assert [row.name for row in found.not_finite()] == ["model.layers.1.mlp.up_proj.weight"]


def test_values_that_come_back_infinite_are_lost_and_no_traceback(tmp_path):
    """3e38 times a block's scale of 448 is beyond FP32 when it is decoded, as on a GPU; in JSON it is no None, which
    says that nothing was lost."""
    weight = torch.full((32, 64), 3e38).bfloat16()
    save_file({"model.layers.0.mlp.down_proj.weight": weight}, tmp_path / "model.safetensors")
    (row,) = inspect_checkpoint(tmp_path, {"nvfp4": preset("bf16_with_nvfp4_mixed")}).measured()
    assert row.losses["nvfp4"].snr_db == -math.inf
    assert row.to_dict()["precisions"]["nvfp4"]["snr_db"] == -1000


def test_every_tensor_is_listed_and_the_right_ones_are_measured(checkpoint):
    found = inspect_checkpoint(checkpoint, RECIPES)
    assert {row.name for row in found.rows} == llama().keys()
    assert found.layers == LAYERS
    measured = found.measured()
    assert len(measured) == 7 * LAYERS
    for row in found.rows:
        assert bool(row.losses) != bool(row.skipped)
        assert (row.place.role in ("embedding", "head", "norm")) == bool(row.skipped)
    assert all(row.losses.keys() == RECIPES.keys() for row in measured)


def test_an_outlier_shows_in_the_blocks_and_only_where_it_shares_a_scale(checkpoint):
    worst = inspect_checkpoint(checkpoint, RECIPES).worst()
    assert len(worst) == 10
    assert worst[0].name == "model.layers.2.mlp.down_proj.weight"
    losses = worst[0].losses
    assert losses["tensorwise"].block_snr_db < 10 < 25 < losses["blockwise"].block_snr_db
    assert losses["tensorwise"].underflow_percent > 40 > 1 > losses["mxfp8"].underflow_percent
    assert losses["delayed"] == losses["tensorwise"]


def test_a_contract_says_what_it_keeps(checkpoint):
    recipes = {"t": RECIPES["tensorwise"].replace(keep=["*.q_proj"]), "mx": RECIPES["mxfp8"]}
    for row in inspect_checkpoint(checkpoint, recipes).measured():
        expected = {0: "first or last layers", LAYERS - 1: "first or last layers"}.get(row.place.layer)
        assert row.kept.get("t") == (expected or ("keep" if row.place.unit == "self_attention.linear_qkv" else None))
        assert "mx" not in row.kept


def test_a_shape_that_fp8_cannot_hold_is_said(tmp_path):
    save_file(
        {"layers.0.fc1.weight": torch.randn(48, 64), "layers.0.fc2.weight": torch.randn(64, 24)},
        tmp_path / "odd.safetensors",
    )
    recipes = {label: RECIPES[label].replace(first_layers=0, last_layers=0) for label in ("tensorwise", "mxfp8")}
    rows = inspect_checkpoint(tmp_path / "odd.safetensors", recipes).rows
    kept = {(row.place.role, label): why for row in rows for label, why in row.kept.items()}
    assert kept.keys() == {("up", "mxfp8"), ("down", "mxfp8"), ("down", "tensorwise")}
    assert kept["down", "tensorwise"] == "24 columns not a multiple of 16"


def test_a_margin_below_zero_saturates_and_one_above_costs_range(checkpoint):
    recipes = {str(m): RECIPES["delayed"].replace(margin=m) for m in (-2, 0, 3)}
    found = inspect_checkpoint(checkpoint, recipes)
    low, none, high = (found.total(label, found.measured()) for label in recipes)
    assert low.saturated > 0 == none.saturated == high.saturated
    assert high.scale_max == pytest.approx(8 * none.scale_max)
    assert high.underflow > none.underflow


def test_an_fp8_checkpoint_is_dequantized_and_its_own_recipe_loses_nothing(tmp_path):
    stored = RECIPES["blockwise-fp32"].operand("weight")
    tensors = {}
    for name, x in llama().items():
        if "proj" in name:
            q = quantize(x, stored)
            tensors |= {name: q.data, f"{name}_scale_inv": q.scale_inv}
        else:
            tensors[name] = x
    found = inspect_checkpoint(write_shards(tmp_path / "fp8", tensors), RECIPES)
    assert {row.name for row in found.rows} == llama().keys()
    for row in found.measured():
        assert row.note == "F8_E4M3, dequantized first"
        assert row.losses["blockwise-fp32"].snr_db > 100
        assert row.losses["blockwise-fp32"].underflow == 0
        assert row.losses["mxfp8"].snr_db < 60


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_codes_whose_scale_was_never_written_are_refused(tmp_path, value):
    """Times zero they are a weight of zeros, of which no recipe loses anything. Blocks of zeros may have any scale."""
    x = torch.randn(256, 256)
    x[:128, :128] = 0
    q = quantize(x, RECIPES["blockwise-fp32"].operand("weight"))
    at, scales = "model.layers.0.mlp.down_proj.weight", q.scale_inv.clone()
    for block, whole in ((0, True), (3, False)):
        scales.view(-1)[block] = value
        save_file({at: q.data, f"{at}_scale_inv": scales}, tmp_path / "fp8.safetensors")
        if whole:
            assert inspect_checkpoint(tmp_path / "fp8.safetensors", RECIPES).measured()
            continue
        with pytest.raises(PrecisionError, match=f"2 of the 4 scales of {at} are zero or negative"):
            inspect_checkpoint(tmp_path / "fp8.safetensors", RECIPES)


def test_a_stack_may_have_one_scale_for_each_expert(tmp_path):
    """Also where there are as many experts as rows."""
    codes = torch.randn(16, 16, 128).to(torch.float8_e4m3fn)
    for shape in ((16,), (16, 1), (16, 1, 1)):
        scales = (torch.arange(16) + 1.0).exp2()
        at = "model.layers.0.mlp.experts.down_proj"
        save_file({at: codes, f"{at}_scale": scales.view(shape)}, tmp_path / "stack.safetensors")
        held = torch.stack([*Checkpoint.open(tmp_path / "stack.safetensors").matrices(at)])
        assert torch.equal(held, codes.float() * scales[:, None, None])


def test_a_stack_of_experts_is_its_experts_together(tmp_path):
    experts = torch.randn(4, 256, 128) * torch.tensor([1.0, 1e-3, 10.0, 1e-5])[:, None, None]
    experts[1, 0, 0] = 90.0
    at = "model.layers.0.mlp.experts"
    save_file({f"{at}.down_proj": experts}, tmp_path / "stack.safetensors")
    save_file({f"{at}.{i}.down_proj.weight": x.clone() for i, x in enumerate(experts)}, tmp_path / "list.safetensors")
    stack, apart = (inspect_checkpoint(tmp_path / f"{n}.safetensors", RECIPES) for n in ("stack", "list"))
    assert len(stack.measured()) == 1
    assert len(apart.measured()) == 4
    for label in RECIPES:
        assert stack.measured()[0].losses[label] == apart.total(label, apart.measured())


class Layer(torch.nn.Module):
    """A layer with a linear for each part of an MLP."""

    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.up_proj = torch.nn.Linear(HIDDEN, FFN, bias=False)
        self.mlp.down_proj = torch.nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.mlp.down_proj(torch.relu(self.mlp.up_proj(x)))


def test_captured_activations_are_measured_as_inputs_and_gradients(checkpoint, tmp_path):
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(Layer() for _ in range(2))
    with nemo_fp8.capture(model, tmp_path / "captured.safetensors") as tensors:
        torch.nn.Sequential(*model.model.layers)(torch.randn(64, HIDDEN)).square().mean().backward()
    found = inspect_checkpoint(checkpoint, RECIPES, activations=tmp_path / "captured.safetensors")
    rows = found.measured("input", "grad")
    assert {row.name for row in rows} == tensors.keys()
    assert {(row.operand, row.place.role) for row in rows} == {
        (o, r) for o in ("input", "grad") for r in ("up", "down")
    }
    for row in rows:
        for label in ("tensorwise", "blockwise", "mxfp8"):
            snr, of_blocks, underflow, _ = _expected(tensors[row.name], RECIPES[label].operand(row.operand), (1, 128))
            assert row.losses[label].snr_db == pytest.approx(snr, abs=1e-3)
            assert row.losses[label].block_snr_db == pytest.approx(of_blocks, abs=1e-3)
            assert row.losses[label].underflow == underflow


def test_progress_counts_every_byte_once(checkpoint):
    seen = []
    found = inspect_checkpoint(
        checkpoint, RECIPES, progress=lambda total: seen.append(total) or (lambda count, name: seen.append(-count))
    )
    assert sum(seen) == 0
    assert len(seen) == 1 + len(found.measured())
    assert seen[0] == found.bytes == sum(row.elements * 2 for row in found.measured())


def test_what_cannot_be_inspected(checkpoint, tmp_path):
    save_file({"model.norm.weight": torch.ones(8), "step": torch.ones(())}, tmp_path / "small.safetensors")
    for arguments, words in (
        ((checkpoint, {"bf16": preset("bf16_mixed")}), "no FP8"),
        ((checkpoint, {}), "No precision"),
        ((tmp_path / "small.safetensors", RECIPES), "no weight matrix"),
    ):
        with pytest.raises(PrecisionError, match=words):
            inspect_checkpoint(*arguments)
    with pytest.raises(PrecisionError, match="no captured activations"):
        inspect_checkpoint(checkpoint, RECIPES, activations=checkpoint)


@pytest.mark.parametrize("block", ["16x16", "1x16"])
@pytest.mark.parametrize("shape", [(256, 384), (144, 80)])
def test_the_loss_in_four_bits_is_what_a_few_plain_lines_compute(block, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[:, :16] *= 1e-3
    operand = NVFP4.replace(weight_block=block).operand("weight")
    found = measure(x, operand, 0, BLOCKS["weight"])
    values, exact = quantize(x, operand).dequantize().double(), x.double()
    assert found.snr_db == pytest.approx(
        _snr(float(exact.square().sum()), float((exact - values).square().sum())), abs=1e-3
    )
    blocks = [
        (exact[i : i + 128, j : j + 128], values[i : i + 128, j : j + 128])
        for i in range(0, shape[0], 128)
        for j in range(0, shape[1], 128)
    ]
    worst = min(_snr(float(a.square().sum()), float((a - b).square().sum())) for a, b in blocks)
    assert found.block_snr_db == pytest.approx(worst, abs=1e-3)
    assert found.underflow == int(((values == 0) & (exact != 0)).sum())
    assert found.elements == x.numel()


def test_a_shape_that_four_bits_cannot_hold_is_measured_and_kept(tmp_path):
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(3))
    save_file({"layers.0.fc1.weight": weight}, tmp_path / "odd.safetensors")
    recipes = {"square": NVFP4, "row": NVFP4.replace(weight_block="1x16")}
    (row,) = inspect_checkpoint(tmp_path / "odd.safetensors", recipes).rows
    assert row.kept.keys() == recipes.keys()
    assert {loss.elements for loss in row.losses.values()} == {40 * 72}
    assert row.transpositions["square"].difference == 0
    assert row.transpositions["row"].elements == 40 * 72
    assert 0.1 < row.transpositions["row"].distance < 0.16


def test_gradients_that_are_rounded_by_chance_are_measured_alike_each_time(checkpoint, tmp_path):
    save_file({"model.layers.0.mlp.up_proj.grad": torch.randn(64, 256)}, tmp_path / "captured.safetensors")
    first, second = (
        inspect_checkpoint(checkpoint, {"nvfp4": NVFP4}, activations=tmp_path / "captured.safetensors").measured("grad")
        for _ in range(2)
    )
    assert first[0].losses == second[0].losses
    assert first[0].transpositions == {}


def test_the_backwards_weight_is_measured_under_every_recipe(checkpoint):
    recipes = RECIPES | {
        "square": NVFP4,
        "row": NVFP4.replace(weight_block="1x16"),
        "same": NVFP4.replace(weight_block="1x16", backward="dequantized"),
        "some": NVFP4.replace(weight_block="1x16", modules=[("*.q_proj", "blockwise")]),
    }
    found = inspect_checkpoint(checkpoint, recipes)
    weights = found.measured("weight")
    assert all(row.transpositions.keys() == recipes.keys() for row in weights)
    far = {label: found.transposition(label, weights).distance for label in recipes}
    assert {label for label, distance in far.items() if distance == 0} == RECIPES.keys() - {"mxfp8"} | {
        "square",
        "same",
    }
    for row in weights:  # a rule for Q is one for K and V, which are stored with it
        ruled = row.place.role in ("q", "k", "v")
        assert row.transpositions["some"].difference == (0 if ruled else row.transpositions["row"].difference)
        assert row.losses["some"] == row.losses["blockwise" if ruled else "row"]


def _four_bits(tensors):
    """Return weights as ModelOpt's NVFP4, and what they decode to."""
    stored, values = {}, {}
    for name, x in tensors.items():
        q = four_bits(x, NVFP4.replace(weight_block="1x16").operand("weight"), amax_of(x))
        found = {"": q.weight, "_scale": q.weight_scale, "_scale_2": q.weight_scale_2}
        stored |= {name + end: tensor for end, tensor in found.items()}
        stored[name.removesuffix("weight") + "input_scale"] = torch.ones(())
        values[name] = QuantizedNVFP4.from_modelopt(q.weight, q.weight_scale, q.weight_scale_2).dequantize()
    return stored, values


def test_nvfp4_of_modelopts_is_measured_as_what_it_decodes_to(tmp_path):
    weights = {name: x.bfloat16() for name, x in llama().items() if "proj" in name}
    stored, values = _four_bits(weights)
    packed, plain = (write_shards(tmp_path / name, of) for name, of in (("packed", stored), ("plain", values)))
    recipes = RECIPES | {"nvfp4": NVFP4}
    found, expected = (inspect_checkpoint(path, recipes).measured() for path in (packed, plain))
    assert len(found) == 7 * LAYERS
    for row, same in zip(found, expected, strict=True):
        assert (row.name, row.shape, row.losses, row.kept) == (same.name, same.shape, same.losses, same.kept)
        assert row.note == "NVFP4, dequantized first"
    assert inspect_checkpoint(packed, recipes).dequantized_words() == f"{7 * LAYERS} in NVFP4"
    assert {row.name for row in inspect_checkpoint(packed, recipes).rows} == weights.keys()  # and no scale


def test_a_stack_of_nvfp4_experts_is_read_matrix_by_matrix(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    experts = torch.randn(3, 64, 32) * torch.tensor([1.0, 1e-3, 10.0])[:, None, None]
    apart = [_four_bits({"weight": x.bfloat16()}) for x in experts]
    stacked = {
        name + end: torch.stack([stored[f"weight{end}"] for stored, _ in apart]) for end in ("", "_scale", "_scale_2")
    }
    save_file(stacked, tmp_path / "stack.safetensors")
    found = [*Checkpoint.open(tmp_path / "stack.safetensors").matrices(name)]
    assert all(torch.equal(ours, values["weight"]) for ours, (_, values) in zip(found, apart, strict=True))


@pytest.mark.parametrize("lacking", [
    {"_scale": None},
    {"_scale": torch.ones(64, 3).to(torch.float8_e4m3fn)},
    {"_scale_2": torch.ones(2)},
], ids=["no scales", "scales of another shape", "too many scales beneath"])  # fmt: skip
def test_nvfp4_without_its_scales_is_one_clear_error(tmp_path, lacking):
    name = "model.layers.0.mlp.down_proj.weight"
    stored, _ = _four_bits({name: torch.randn(64, 32).bfloat16()})
    stored |= {name + end: tensor for end, tensor in lacking.items()}
    save_file({key: x for key, x in stored.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(PrecisionError, match=r"model.layers.0.mlp.down_proj.weight"):
        inspect_checkpoint(tmp_path / "model.safetensors", RECIPES)


def test_what_is_packed_otherwise_is_named(tmp_path):
    packed = {f"model.layers.{i}.mlp.up_proj.qweight": torch.ones(8, 8, dtype=torch.int32) for i in range(2)}
    save_file(packed, tmp_path / "awq.safetensors")
    with pytest.raises(PrecisionError, match=r"0.mlp.up_proj.qweight and 1 more \(I32 is packed"):
        inspect_checkpoint(tmp_path / "awq.safetensors", RECIPES)
    save_file(packed | {"model.layers.0.mlp.down_proj.weight": torch.randn(64, 64)}, tmp_path / "mixed.safetensors")
    found = inspect_checkpoint(tmp_path / "mixed.safetensors", RECIPES)
    assert found.packed_words().startswith("model.layers.0.mlp.up_proj.qweight and 1 more")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_without_a_finite_value_has_not_lost_nothing(tmp_path, value):
    good, bad = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"
    save_file({good: torch.randn(64, 64), bad: torch.full((64, 64), value)}, tmp_path / "model.safetensors")
    recipes = RECIPES | {"nvfp4": NVFP4}
    found = inspect_checkpoint(tmp_path / "model.safetensors", recipes)
    assert found.not_finite_words() == f"{bad} (all of it)"
    (broken,) = [row for row in found.measured() if row.name == bad]
    assert {snr for loss in broken.losses.values() for snr in (loss.snr_db, loss.block_snr_db)} == {-math.inf}
    assert {told["snr_db"] for told in broken.to_dict()["precisions"].values()} == {-1000.0}
    for label in recipes:  # no recipe mends it, so none is advised to keep it
        assert advise(found, label).below == ()
        total = found.total(label, found.measured())
        assert min(total.snr_db, total.block_snr_db) > 10
        assert found.total(label, [broken]).block_snr_db == -math.inf
    operand = RECIPES["blockwise"].operand("weight")
    assert quantize(torch.full((64, 64), value), operand, statistics=True).statistics.total().snr_db == -math.inf
