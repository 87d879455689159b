"""Patterns of any kind and naming, and the linears that they may name: of dense and MoE models, MLA and hybrids."""

from hypothesis import strategies as st

EXPERTS = 4
LAYERS = (0, 1, 2, 9, 10, 12, 13, 19, 20, 31, 100, 127)
MEGATRONS = (
    "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
    "mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj", "self_attention.linear_q_proj", "mixer.in_proj", "mixer.out_proj",
)  # fmt: skip
VLLMS = (
    "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "mlp.experts",
    "block_sparse_moe.experts", "mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj",
    "self_attn.fused_qkv_a_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "mixer.in_proj", "mixer.out_proj",
    "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj",
)  # fmt: skip
PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.experts.0.up_proj",
    "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa",
)  # fmt: skip
tails = st.sampled_from((*MEGATRONS, *VLLMS, *PARTS))
layers = st.sampled_from(("*", "0", "1", "12", "1[23]", "[0-3]", "1?", "?", "[!0]", "*[02468]"))
stacks = st.sampled_from(("*", "decoder", "model", "backbone"))
patterns = st.one_of(
    tails.map(lambda tail: f"*.{tail}"),
    tails.map(lambda tail: f"*.{tail.rpartition('.')[2]}"),
    tails.map(lambda tail: f"*.{tail.partition('.')[0]}.*"),
    tails.map(lambda tail: f"*{tail.rpartition('.')[2][:-1]}?"),
    st.builds("{}.layers.{}.*".format, stacks, layers),
    st.builds("{}.layers.{}.{}".format, stacks, layers, tails),
    st.sampled_from((
        "*", "*.experts.*", "*.linear_fc*", "*.linear_*", "*_proj", "*.mlp.*", "*attn*", "*.self_att*",
        r"re:layers\.(0|12)\.", r"re:^model\.layers\.1\d", r"re:(mlp|mixer)\.", "re:linear_fc[12]$",
    )),
)  # fmt: skip


def ruled(base, *recipes):
    """Contracts with up to one name to keep and three rules beyond a base contract's own."""
    rules = st.lists(st.tuples(patterns, st.sampled_from(recipes)), max_size=3).map(tuple)
    keep = st.lists(patterns, max_size=1).map(tuple)
    return st.builds(lambda keep, rules: base.replace(keep=keep, modules=rules), keep, rules)
