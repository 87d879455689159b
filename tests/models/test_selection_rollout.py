"""Which weights are held in FP8: the rules one by one, the units, and that a checkpoint's and an engine's view
agree."""

import pytest

from nemo_fp8 import Precision, PrecisionError
from nemo_fp8.models.selection import ALWAYS, COMPUTE, KEEP, LAYERS, SHAPE, why_kept
from nemo_fp8.models.units import part_names, select, units_of

FP8 = Precision(rollout="fp8")
VLLM = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def decoder(layers=4, hidden=256, ffn=512, kv=128, experts=0, stacked=False, prefix="model."):
    """The tensors of a Llama, or of a Mixtral-like model where every layer has experts."""
    tensors = {f"{prefix}embed_tokens.weight": (1024, hidden)}
    for i in range(layers):
        at = f"{prefix}layers.{i}."
        tensors |= {f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,)}
        tensors |= {
            f"{at}self_attn.{n}_proj.weight": (rows, hidden)
            for n, rows in (("v", kv), ("q", hidden), ("k", kv), ("o", hidden))
        }
        tensors |= {f"{at}self_attn.q_proj.bias": (hidden,)}
        shapes = (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn)))
        if experts:
            tensors[f"{at}mlp.gate.weight"] = (experts, hidden)
        if experts and stacked:
            tensors[f"{at}mlp.experts.gate_up_proj"] = (experts, hidden, 2 * ffn)
            tensors[f"{at}mlp.experts.down_proj"] = (experts, ffn, hidden)
        elif experts:
            tensors |= {f"{at}mlp.experts.{e}.{n}_proj.weight": shape for e in range(experts) for n, shape in shapes}
        else:
            tensors |= {f"{at}mlp.{n}_proj.weight": shape for n, shape in shapes}
    return tensors | {f"{prefix}norm.weight": (hidden,), "lm_head.weight": (1024, hidden)}


def modules(names):
    return {name.removesuffix(".weight") for name in names}


def test_linears_of_the_decoder_and_nothing_else():
    chosen = select(decoder(), FP8)
    assert all("_proj" in name and "layers." in name and not name.endswith("bias") for name in chosen.quantized)
    assert len(chosen.quantized) == 4 * 7
    assert {kept.rule for kept in chosen.kept.values()} == {ALWAYS}
    assert chosen.not_converted == ("lm_head",)


def test_no_fp8_rollout_quantizes_nothing():
    chosen = select(decoder(), Precision())
    assert not chosen.quantized
    assert chosen.kept["model.layers.0.mlp.up_proj.weight"].rule == COMPUTE


def test_first_and_last_layers_count_the_decoders_layers_only():
    tensors = decoder() | {f"visual.blocks.{i}.attn.qkv.weight": (768, 256) for i in range(8)}
    chosen = select(tensors, FP8.replace(first_layers=1, last_layers=1), layers=4)
    assert {name.split(".")[2] for name in chosen.quantized} == {"1", "2"}
    assert chosen.kept["visual.blocks.1.attn.qkv.weight"].rule == ALWAYS
    assert chosen.kept["model.layers.3.mlp.up_proj.weight"].rule == LAYERS
    assert "model.layers.3.self_attn.q_proj" in chosen.not_converted
    assert "visual.blocks.1.attn.qkv" in chosen.not_converted


def test_layers_behind_the_last_are_kept():
    chosen = select(decoder(layers=5), FP8, layers=4)
    assert {name.split(".")[2] for name in chosen.quantized} == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    "pattern", ["*.layers.2.*q_proj", "*.linear_qkv", r"re:layers\.2\.self_attention\.linear_qkv$", "*.qkv_proj"]
)
def test_one_part_keeps_its_unit_in_every_language(pattern):
    """Q alone, Megatron's name and vLLM's name: Q, K and V stay together, since engines hold them as one."""
    unit = ["model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.k_proj", "model.layers.2.self_attn.v_proj"]
    engine = why_kept(
        FP8.replace(keep=(pattern,)), part_names("model.layers.2.self_attn.qkv_proj", VLLM), [((256, 128, 128), 256)], 4
    )
    assert engine is not None
    assert engine.rule == KEEP
    kept = select(decoder(), FP8.replace(keep=(pattern,))).by_rule(KEEP)
    assert modules(kept) & set(unit) == set(unit)
    assert not any("o_proj" in name for name in kept)


def test_parts_lie_in_the_order_of_the_fused_rows():
    unit = next(unit for unit in units_of(decoder()) if "model.layers.0.self_attn.q_proj.weight" in unit.tensors)
    assert [name.split(".")[-1] for name in unit.modules] == ["q_proj", "k_proj", "v_proj"]
    assert unit.shapes == ((256, 256), (128, 256), (128, 256))


@pytest.mark.parametrize(("rows", "fits"), [(256, True), (288, True), (272, False), (264, False)])
def test_the_rows_of_the_last_part_are_a_multiple_of_what_kernels_take(rows, fits):
    """32, for AMX's tiles and CUTLASS; DeepSeek's down projections end on 576 rows."""
    for p in (FP8, FP8.replace(rollout_block="tensor")):
        reason = why_kept(p, ("model.layers.0.self_attn.o_proj",), [((rows,), 256)], 4)
        assert (reason is None) is fits
        assert fits or reason.reason == f"{rows} rows are not a multiple of 32"
        columns = why_kept(p, ("model.layers.0.self_attn.o_proj",), [((256,), 192)], 4)
        assert columns.reason == "192 columns are not a multiple of 128"


@pytest.mark.parametrize(
    ("changes", "fits", "reason"),
    [
        ({"kv": 128}, True, ""),
        ({"kv": 64}, False, "a part of 64 rows is not a multiple of 128"),
        ({"ffn": 640}, True, ""),
        ({"ffn": 576}, False, "a part of 576 rows is not a multiple of 128"),
        ({"hidden": 192}, False, "192 columns are not a multiple of 128"),
    ],
)
def test_shapes(changes, fits, reason):
    tensors = decoder(**changes)
    chosen = select(tensors, FP8)
    reasons = {kept.reason for kept in chosen.by_rule(SHAPE).values()}
    assert (not reasons) is fits
    assert fits or reason in reasons
    if fits:
        assert not chosen.misaligned
        return
    assert all(problem.what and problem.why and problem.remedy for problem in chosen.misaligned)
    with pytest.raises(PrecisionError) as error:
        select(tensors, FP8.replace(strict=True))
    assert [problem.what for problem in error.value.problems] == [
        problem.what for problem in chosen.misaligned
    ]  # all at once
    assert {problem.severity for problem in error.value.problems} == {"error"}
    assert {problem.severity for problem in chosen.misaligned} == {"warning"}


def test_the_last_part_may_end_in_a_ragged_block():
    """DeepSeek's kv_a_proj_with_mqa has 576 rows, behind q_a_proj's 1536."""
    at = "model.layers.0.self_attn."
    down = {f"{at}kv_a_proj_with_mqa.weight": (576, 7168), f"{at}q_a_proj.weight": (1536, 7168)}
    assert select(down, FP8).quantized == set(down)
    assert select(down | {f"{at}kv_a_proj_with_mqa.weight": (570, 7168)}, FP8).quantized == set()


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_one_unit_and_routers_stay(stacked):
    tensors = decoder(experts=4, stacked=stacked)
    chosen = select(tensors, FP8.replace(keep=("*.layers.1.mlp.experts*down_proj",)))
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert {chosen.kept[name].rule for name in routers} == {ALWAYS}
    assert {name for name in tensors if ".experts" in name} - chosen.quantized == {
        n for n in tensors if ".layers.1.mlp.experts" in n
    }
    assert "model.layers.1.mlp.experts" in chosen.not_converted
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} < set(chosen.not_converted)
    narrow = select(decoder(experts=4, ffn=192, stacked=stacked), FP8)
    assert not any(".experts" in name for name in narrow.quantized)


def test_stacks_of_convolutions_are_no_experts():
    assert select({"model.layers.0.mixer.conv1d.weight": (256, 128, 128)}, FP8).quantized == set()


@pytest.mark.parametrize(
    "changes", [{}, {"first_layers": 1, "last_layers": 1}, {"keep": ("*.k_proj", "*experts.3.up_proj")}]
)
@pytest.mark.parametrize("shape", [{}, {"kv": 64}, {"experts": 4}, {"experts": 4, "ffn": 192}])
def test_checkpoint_and_engine_choose_the_same(changes, shape):
    """What select() says of tensors is what why_kept() says of the modules that vLLM builds from them."""
    precision = FP8.replace(**changes)
    tensors, h, f, kv = decoder(**shape), 256, shape.get("ffn", 512), shape.get("kv", 128)
    quantized = modules(select(tensors, precision).quantized)
    for i in range(4):
        at = f"model.layers.{i}."
        built = {
            f"{at}self_attn.qkv_proj": [((h, kv, kv), h)],
            f"{at}self_attn.o_proj": [((h,), h)],
            **(
                {}
                if shape.get("experts")
                else {f"{at}mlp.gate_up_proj": [((f, f), h)], f"{at}mlp.down_proj": [((h,), f)]}
            ),
        }
        for prefix, shapes in built.items():
            names = part_names(prefix, VLLM)
            assert (why_kept(precision, names, shapes, 4) is None) == (names[-1] in quantized), prefix
        if shape.get("experts"):
            names = part_names(f"{at}mlp.experts", experts=4)
            engine = why_kept(precision, names, [((f, f), h), ((h,), f)], 4, experts=True)
            assert (engine is None) == (names[-1] in quantized)
            gate = why_kept(precision, [f"{at}mlp.gate"], [((4,), h)], 4)
            assert gate is not None
            assert gate.rule == ALWAYS


def test_parts_of_one_linear_have_one_input():
    at = "model.layers.0.mlp."
    with pytest.raises(PrecisionError, match="256 and 512 columns"):
        select({f"{at}gate_proj.weight": (512, 256), f"{at}up_proj.weight": (512, 512)}, FP8)
