"""Small checkpoints with everything that an exporter meets: shards, a config, a tokenizer's files, experts, odd
shapes."""

import json

import torch
from safetensors.torch import save_file

HIDDEN, FFN, KV, VOCAB = 256, 384, 128, 160


def config(layers=3, **more):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size":
        VOCAB, "torch_dtype": "bfloat16", **more, }  # fmt: skip


def tensors(layers=3, experts=0, stacked=False, dtype=torch.bfloat16, kv=KV, seed=0):
    draws = torch.Generator().manual_seed(seed)

    def weight(*shape):
        # Rows of several sizes, so that tiles have scales of their own and some are rounded to half of the largest
        # code.
        return (torch.randn(*shape, generator=draws) * torch.rand(*shape[:-1], 1, generator=draws)).to(dtype)

    out = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN)}
    for i in range(layers):
        at = f"model.layers.{i}."
        out |= {f"{at}{n}_layernorm.weight": torch.ones(HIDDEN, dtype=dtype) for n in ("input", "post_attention")}
        sizes = {"q": (HIDDEN, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, HIDDEN)}
        out |= {f"{at}self_attn.{n}_proj.weight": weight(*shape) for n, shape in sizes.items()}
        mlp = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
        if experts:
            out[f"{at}mlp.gate.weight"] = weight(experts, HIDDEN)
        if stacked:
            out |= {
                f"{at}mlp.experts.gate_up_proj": weight(experts, HIDDEN, 2 * FFN),
                f"{at}mlp.experts.down_proj": weight(experts, FFN, HIDDEN),
            }
        else:
            places = [f"{at}mlp.experts.{e}." for e in range(experts)] or [f"{at}mlp."]
            out |= {f"{place}{n}.weight": weight(*shape) for place in places for n, shape in mlp.items()}
    return out | {"model.norm.weight": torch.ones(HIDDEN, dtype=dtype), "lm_head.weight": weight(VOCAB, HIDDEN)}


def write(folder, weights=None, shards=3, **settings):
    """A checkpoint in shards, with an index, a config and what lies around it."""
    weights = tensors() if weights is None else weights
    folder.mkdir(parents=True)
    names, index = [*weights], {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config(**settings)))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "pytorch_model.bin").write_bytes(b"a pickle that nobody reads")
    (folder / ".gitattributes").write_text("*")
    return folder


def content(folder):
    """Every file of a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
