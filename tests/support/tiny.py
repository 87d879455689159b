"""Tiny models with random weights, and what can go wrong with them."""

import torch

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
VOCABULARY = 160


def config(family="qwen3", **changes):
    """A ``config.json``."""
    fixed = {
        "vocab_size": VOCABULARY,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
    }
    return SHAPE | fixed | FAMILIES[family] | changes


def state_dict(c, seed=0):
    """Every tensor, by its Hugging Face name, in BF16."""
    g = torch.Generator().manual_seed(seed)
    hidden, dim, heads, kv = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    kind, moe = c["model_type"], "num_experts_per_tok" in c
    experts = c.get("num_experts", c.get("num_local_experts", 0))
    wide = c.get("moe_intermediate_size", c["intermediate_size"])
    at, names = (
        ("block_sparse_moe", ("w1", "w3", "w2"))
        if kind == "mixtral"
        else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )

    def matrix(rows, columns, scale=1.0):
        return (torch.randn(rows, columns, generator=g) * scale * columns**-0.5).bfloat16()

    def norm(size):
        return (1 + 0.1 * torch.randn(size, generator=g)).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(
            c["vocab_size"], hidden, 1.0 if c.get("tie_word_embeddings") else hidden**0.5
        )
    }
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors[p + "input_layernorm.weight"], tensors[p + "post_attention_layernorm.weight"] = (
            norm(hidden),
            norm(hidden),
        )
        for part, count in (("q", heads), ("k", kv), ("v", kv)):
            tensors[f"{p}self_attn.{part}_proj.weight"] = matrix(count * dim, hidden)
            if kind == "qwen2":
                tensors[f"{p}self_attn.{part}_proj.bias"] = norm(count * dim) - 1
        tensors[p + "self_attn.o_proj.weight"] = matrix(hidden, heads * dim)
        if kind.startswith("qwen3"):
            tensors[p + "self_attn.q_norm.weight"], tensors[p + "self_attn.k_norm.weight"] = norm(dim), norm(dim)
        if moe:
            tensors[f"{p}{at}.gate.weight"] = matrix(experts, hidden, 3.0)
        for block in [f"{p}{at}.experts.{e}." for e in range(experts)] if moe else [f"{p}{at}."]:
            gate, up, down = names
            tensors[f"{block}{gate}.weight"], tensors[f"{block}{up}.weight"] = (
                matrix(wide, hidden),
                matrix(wide, hidden),
            )
            tensors[f"{block}{down}.weight"] = matrix(hidden, wide)
    tensors["model.norm.weight"] = norm(hidden)
    if not c.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = matrix(c["vocab_size"], hidden, 2.5)
    return tensors


def tokens(sequences=16, length=24, seed=7):
    return torch.randint(0, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- accidents, on weights before they are quantized


def zeroed(weights, name):
    return weights | {name: torch.zeros_like(weights[name])}


def swapped(weights, a, b):
    return weights | {a: weights[b], b: weights[a]}


def noisy(weights, prefix, size, seed=3):
    """The weights of a layer before a step that changed them by a share of their size."""
    g = torch.Generator().manual_seed(seed)

    def before(t):
        return (t.float() + size * t.float().std() * torch.randn(t.shape, generator=g)).to(t.dtype)

    return weights | {name: before(t) for name, t in weights.items() if name.startswith(prefix) and t.dim() == 2}
