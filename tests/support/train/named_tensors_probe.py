"""What the tests of exports have done inside of a run, on every rank: the weights by Hugging Face's names, and
logits."""

import json
import os
from pathlib import Path

import torch

SAMPLE = "Anna has 3 apples. Ben gives her 4 more. Now"


def save(trainer, extra):
    """All named tensors of the live model, and its logits where one rank can compute them, beside the checkpoints."""
    from megatron.core import parallel_state
    from safetensors.torch import save_file

    from nemo_fp8.train.to_hugging_face import config_of, named_tensors

    tensors = {name: tensor.contiguous().clone() for name, tensor in named_tensors(trainer.model)}
    folder = Path(os.environ["NEMO_FP8_TEST_FOLDER"])
    rank = torch.distributed.get_rank()
    save_file(tensors, folder / f"live-{rank}.safetensors", metadata={"format": "pt"})
    if rank == 0:
        (folder / "live.json").write_text(json.dumps(config_of(trainer.model)))
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        logits = _logits(trainer)
        if rank == 0:
            save_file({"logits": logits}, folder / "logits.safetensors")


@torch.no_grad()
def _logits(trainer):
    from megatron.core import parallel_state

    from nemo_fp8.train.to_hugging_face import _chunks_of, _unwrapped

    (model,) = map(_unwrapped, _chunks_of(trainer.model))
    model.eval()
    tokens = torch.tensor([list(SAMPLE.encode())])
    tokens = tokens[:, : tokens.shape[1] // 16 * 16]  # FP8 GEMMs take multiples of 8 rows
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    out = model(tokens, torch.arange(length)[None], causal).contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(out) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(shards, out, group=group)
    return torch.cat(shards, -1)[0].float()
