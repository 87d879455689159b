"""Tiny random checkpoints in Hugging Face's layout, with a tokenizer: what the real thing looks like, in a megabyte.

State dicts are written by hand, in the order in which a checkpoint has them, so that a test knows every name.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 512
# Two names of tensors that every kind has.
K_PROJ, NORM = "model.layers.2.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# What differs from the family's own shape: Llama's head is tied or not, and `wide` is for tensor parallelism: no cut
# between two workers is in the midst of a block.
KINDS = {
    "qwen3": {"family": "qwen3"},
    "llama": {"family": "llama"},
    "llama_tied": {"family": "llama", "tied": True},
    "qwen3_moe": {"family": "qwen3_moe", "kv_heads": 4},
    "qwen3_wide": {"family": "qwen3", "kv_heads": 4},
    "qwen3_moe_wide": {"family": "qwen3_moe", "kv_heads": 4, "intermediate": 1024},
    "qwen3_odd": {"family": "qwen3", "kv_heads": 1, "intermediate": 320},
}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def write(folder: Path, kind: str, seed: int = 0, **changes: int) -> Path:
    """A checkpoint of this kind with weights drawn from this seed."""
    shape = {
        "hidden": 256,
        "layers": 4,
        "intermediate": 512,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "experts": 8,
        "tied": False,
    }
    shape |= KINDS[kind] | changes
    folder.mkdir(parents=True)
    config, tensors = configuration(**shape), state_dict(seed=seed, **shape)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def configuration(family, hidden, layers, intermediate, heads, kv_heads, head_dim, experts, tied):
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    of_family = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}[family]
    moe = {
        "moe_intermediate_size": intermediate // 4, "num_experts": experts, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    }  # fmt: skip
    config = of_family(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=intermediate, vocab_size=VOCABULARY,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=2048, tie_word_embeddings=tied,
        bos_token_id=VOCABULARY - 2, eos_token_id=VOCABULARY - 1, **(moe if family == "qwen3_moe" else {}),
    ).to_dict()  # fmt: skip
    config.pop("dtype", None)
    return config | {"architectures": [ARCHITECTURES[family]], "torch_dtype": "bfloat16"}


def state_dict(family, hidden, layers, intermediate, heads, kv_heads, head_dim, experts, tied, seed=0):
    """Every tensor of the checkpoint, by its Hugging Face name."""
    draws = torch.Generator().manual_seed(seed)

    def weight(rows, columns, scale=1.0):
        return (torch.randn(rows, columns, generator=draws) * scale * columns**-0.5).bfloat16()

    def ones(size):
        return torch.ones(size, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": weight(VOCABULARY, hidden, hidden**0.5)}
    for layer in range(layers):
        name = f"model.layers.{layer}."
        tensors[name + "input_layernorm.weight"] = ones(hidden)
        tensors[name + "post_attention_layernorm.weight"] = ones(hidden)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            tensors[f"{name}self_attn.{part}_proj.weight"] = weight(count * head_dim, hidden)
        tensors[name + "self_attn.o_proj.weight"] = weight(hidden, heads * head_dim)
        if family != "llama":
            tensors[name + "self_attn.q_norm.weight"] = ones(head_dim)
            tensors[name + "self_attn.k_norm.weight"] = ones(head_dim)
        if family == "qwen3_moe":
            tensors[name + "mlp.gate.weight"] = weight(experts, hidden, 4.0)
            blocks = [(f"{name}mlp.experts.{expert}.", intermediate // 4) for expert in range(experts)]
        else:
            blocks = [(f"{name}mlp.", intermediate)]
        for block, wide in blocks:
            tensors[block + "gate_proj.weight"] = weight(wide, hidden)
            tensors[block + "up_proj.weight"] = weight(wide, hidden)
            tensors[block + "down_proj.weight"] = weight(hidden, wide)
    tensors["model.norm.weight"] = ones(hidden)
    if not tied:
        tensors["lm_head.weight"] = weight(VOCABULARY, hidden, 2.5)
    return tensors


def write_adapter(folder: Path, tensors, seed: int = 0, rank: int = 8) -> Path:
    """A LoRA adapter for every attention and dense linear of a checkpoint's tensors, as PEFT writes one."""
    draws = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        if re.search(r"\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$", name):
            linear, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", tensor.shape
            found[f"{linear}.lora_A.weight"] = (torch.randn(rank, columns, generator=draws) / 8).bfloat16()
            found[f"{linear}.lora_B.weight"] = (torch.randn(rows, rank, generator=draws) / 8).bfloat16()
    names = sorted({name.split(".")[-3] for name in found})
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    save_file(found, folder / "adapter_model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """One word for each number, so that text and token ids are as good as the same."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [chr(33 + i) if i < 94 else f"t{i}" for i in range(VOCABULARY - 3)] + ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def weights_of(folder):
    """Every tensor of a checkpoint, by its Hugging Face name."""
    return load_file(folder / "model.safetensors")


def tensors_of(folder):
    """Names and tensors of a checkpoint, as a trainer would push them."""
    return weights_of(folder).items()


def stepped(tensors, seed=0, size=1e-5):
    """The tensors after a step of an optimizer, as far as a push can tell: most BF16 values stay."""
    draws = torch.Generator().manual_seed(seed)
    return {name: (t.float() + size * torch.randn(t.shape, generator=draws)).to(t.dtype) for name, t in tensors.items()}


def stacked(tensors):
    """All experts of a layer in two stacks, as transformers 5 keeps them: gate above up, and down."""
    found, parts = {}, {}
    for name, tensor in tensors.items():
        match = _OF_EXPERT.fullmatch(name)
        if match:
            parts.setdefault(match[1], {"gate": [], "up": [], "down": []})[match[3]].append(tensor)
        else:
            found[name] = tensor
    for name, part in parts.items():
        gate, up, down = (torch.stack(part[which]) for which in ("gate", "up", "down"))
        found |= {f"{name}.gate_up_proj": torch.cat([gate, up], 1), f"{name}.down_proj": down}
    return found
