"""What check says of two contracts, beside what each side does with every linear of a model: no false yes."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.patterns import EXPERTS, LAYERS, ruled

from nemo_fp8.contract import Precision
from nemo_fp8.models.selection import contract_of, why_kept_by_name
from nemo_fp8.preflight.agreement import check

ALIKE = Precision(
    format="e2m1", scaling="nvfp4", weight_block="1x16", row_scaled=True, hadamard=False, stochastic_rounding=False,
    backward="dequantized",
)  # fmt: skip
BLOCKS = Precision(format="e4m3", scaling="blockwise")
ATTENTION, MLP = "self_attention.linear_", "mlp.linear_"
# What an engine holds as one, by its names and those of a checkpoint; and Megatron's linears in it.
ENGINE = (
    (("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (f"{ATTENTION}qkv",)),
    (("self_attn.o_proj",), (f"{ATTENTION}proj",)),
    (("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"), (f"{MLP}fc1",)),
    (("mlp.down_proj",), (f"{MLP}fc2",)),
    (
        ("mlp.experts", *(f"mlp.experts.{e}.{w}_proj" for e in range(EXPERTS) for w in ("gate", "up", "down"))),
        ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"),
    ),
    (
        ("self_attn.fused_qkv_a_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        (f"{ATTENTION}q_down_proj", f"{ATTENTION}kv_down_proj"),
    ),
    (("mixer.in_proj",), ("mixer.in_proj",)),
    (("mixer.out_proj",), ("mixer.out_proj",)),
)


def _stored(p, names, experts, side):
    if why_kept_by_name(p, names, None, side=side, experts=experts) is not None:
        return None
    weight = contract_of(p, names, experts, side).operand("weight", side)
    # Powers of two are the same values in any blocks.
    return weight and (weight.format, weight.block if weight.format == "e2m1" else None)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from((ALIKE, BLOCKS))
    .flatmap(lambda base: st.tuples(*2 * [ruled(base, "bf16", "mxfp8", "nvfp4", "blockwise")]))
    .flatmap(lambda two: st.sampled_from((two, (two[0], two[0]))))
)
def test_sides_that_store_a_linear_otherwise_do_not_agree(sides):
    train, rollout = sides
    for layer in LAYERS:
        for theirs, ours in ENGINE:
            experts = EXPERTS if len(theirs) > 4 else 0
            there = _stored(rollout, [f"model.layers.{layer}.{name}" for name in theirs], experts, "rollout")
            for name in ours:
                here = _stored(train, [f"decoder.layers.{layer}.{name}"], experts, "train")
                if here != there:
                    assert not check(train=train, rollout=rollout).agrees, (layer, name, here, there)
                    return
