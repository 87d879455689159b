"""Small checkpoints with the names, shapes and troubles of real ones."""

import json

import torch
from safetensors.torch import save_file

HIDDEN, FFN, LAYERS = 128, 256, 4


def llama(seed=0, layers=LAYERS):
    """Weights by name, as Hugging Face has them: BF16, layer 2 with an outlier that swamps half of its down
    projection."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": (64, HIDDEN), "lm_head.weight": (64, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.self_attn.{n}_proj.weight": (HIDDEN, HIDDEN) for n in "qkvo"}
        tensors |= {f"{at}.mlp.{n}_proj.weight": (FFN, HIDDEN) for n in ("gate", "up")}
        tensors |= {f"{at}.mlp.down_proj.weight": (HIDDEN, FFN), f"{at}.input_layernorm.weight": (HIDDEN,)}
    made = {name: torch.randn(shape, generator=generator).mul_(0.02) for name, shape in tensors.items()}
    if layers > 2:
        down = made["model.layers.2.mlp.down_proj.weight"]
        down[:, :128] *= 1e-5
        down[5, 200] = 40.0
    return {name: x.bfloat16() for name, x in made.items()}


def write_shards(folder, tensors, count=3, index=True):
    """A folder of shards, with an index or without."""
    folder.mkdir(exist_ok=True)
    names, where = list(tensors), {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder
