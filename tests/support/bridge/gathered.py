"""Attention over ranks of context parallelism that needs no GPU: keys and values are gathered, and a rank attends with
the queries that it has.

    rank r of n    chunks r and 2 n - 1 - r of 2 n, of every sequence: as Megatron cuts a batch

TE's own passes keys and values around a ring of cuDNN's or FlashAttention's kernels, which a CPU has not. It stands in
their place in a layer's specification; all else of the layer, and of the run, is Megatron's and TE's.
"""

import torch
from megatron.bridge.models.gpt_provider import transformer_engine_layer_spec
from megatron.core import parallel_state
from torch.distributed.nn.functional import all_gather


def layers(config):
    """The specification of TE's layers with this attention."""
    spec = transformer_engine_layer_spec(config)
    spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


class GatheredAttention(torch.nn.Module):
    def __init__(self, config, **settings):
        super().__init__()
        self.group = parallel_state.get_context_parallel_group()

    def forward(self, query, key, value, mask, **settings):
        """Attend to tensors of [tokens of this rank, sequences, heads, width], causally."""
        rank, ranks = self.group.rank(), self.group.size()
        chunk = query.shape[0] // 2
        chunks = [c for r in range(ranks) for c in (r, 2 * ranks - 1 - r)]
        places = torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in chunks])
        key, value = (torch.cat(all_gather(x.contiguous(), self.group)) for x in (key, value))
        here = places[2 * chunk * rank : 2 * chunk * (rank + 1)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in (query, key, value)), here[:, None] >= places[None], enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)
