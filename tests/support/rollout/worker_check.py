"""A worker that compares what it holds with the checkpoint on disk, by slices and casts of its own.

Neither vLLM's loaders nor the fast kernels have a part in it: shards are cut by hand, quantized by the specification
in torch, and packed by vLLM's packer where its kernel reads packed codes. Named as ``worker_extension_cls``.
"""

import torch

from nemo_fp8.numerics.formats import format_of
from nemo_fp8.numerics.quantize import quantize_reference
from nemo_fp8.rollout.engine.worker import NemoFp8Worker

FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
BY_COLUMNS = ("o_proj", "down_proj")


class CheckedWorker(NemoFp8Worker):
    """``llm.collective_rpc("nemo_fp8_check", args=(folder,))``: how many layers were compared, and which differ."""

    def nemo_fp8_check(self, folder, kind="fp32"):
        self._look(folder)
        compared, differ = 0, []
        for name, layer in self.model_runner.model.named_modules():
            if hasattr(getattr(layer, "quant_method", None), "nemo_fp8_reason"):
                continue  # in BF16, and it says why
            if type(layer).__name__ == "RoutedExperts":
                pairs = self._experts(name.removesuffix(".routed_experts"), layer)
            elif hasattr(getattr(layer, "quant_method", None), "fp8_linear"):
                pairs = self._linear(name, layer)
            else:
                continue
            for source, codes, scale_inv, packed in pairs:
                compared += 1
                wanted, wanted_scale, _ = quantize_reference(source, (128, 128), format_of("e4m3"), kind)
                wanted = torch.ops._C.convert_weight_packed(wanted) if packed else wanted
                if not (same_bits(codes, wanted) and same_bits(scale_inv, wanted_scale)):
                    differ.append(name)
        return {"rank": self.place[0], "compared": compared, "differ": differ}

    def nemo_fp8_check_four_bits(self, folder):
        """The same for NVFP4: whole weights are quantized beneath the amax of all that is fused, and cut by hand."""
        self._look(folder)
        compared, differ = 0, []
        for name, layer in self.model_runner.model.named_modules():
            for parts, held in self._in_four_bits(name, layer):
                compared += 1
                amax = max(self.weights[part].abs().max().float() for part in parts)
                made = [self._cut(part, amax) for part in parts]
                wanted = [torch.cat(rows) for rows in zip(*made, strict=True)]
                same = all(same_bits(a, b) for a, b in zip(held[:2], wanted, strict=True))
                if not (same and held[2] == amax / 2688):
                    differ.append(name)
        return {"rank": self.place[0], "compared": compared, "differ": differ}

    def _look(self, folder):
        """Read the checkpoint's weights, and find this worker's place among all."""
        from safetensors.torch import load_file
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.weights = load_file(f"{folder}/model.safetensors")
        self.place = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()

    def _in_four_bits(self, name, layer):
        method = type(getattr(layer, "quant_method", None)).__name__
        parent, _, last = name.rpartition(".")
        if method == "Nvfp4LinearMethod":
            names = [f"{parent}.{part}.weight" for part in FUSED[f"{parent.rsplit('.', 1)[-1]}.{last}"]]
            yield names, (layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        if method == "Nvfp4MoEMethod":
            here = name.removesuffix(".routed_experts")
            for expert in range(layer.local_num_experts):
                for which, words in (("w13", ("gate", "up")), ("w2", ("down",))):
                    held = [getattr(layer, f"{which}_weight{end}").data[expert] for end in ("", "_scale", "_scale_2")]
                    yield [f"{here}.{expert}.{word}_proj.weight" for word in words], held

    def _cut(self, name, amax):
        from nemo_fp8.contract import Operand
        from nemo_fp8.numerics import quantize

        rank, ranks = self.place
        q = quantize(self.weights[name], Operand("e2m1", (1, 16), "e4m3"), amax=amax)
        dim = int(name.split(".")[-2] in BY_COLUMNS)
        return q.data.chunk(ranks, dim)[rank], q.scale_inv.view(torch.uint8).chunk(ranks, dim)[rank].view(
            torch.float8_e4m3fn
        )

    def _linear(self, name, layer):
        parent, _, last = name.rpartition(".")
        parts = FUSED[f"{parent.rsplit('.', 1)[-1]}.{last}"]
        source = torch.cat([self._shard(f"{parent}.{part}.weight") for part in parts])
        packed = type(layer.quant_method.fp8_linear).__name__.startswith("CPU")
        yield source, layer.weight.data, layer.weight_scale_inv.data, packed

    def _experts(self, name, layer):
        packed = type(layer.quant_method).__name__ == "NemoFp8MoEMethod"
        for expert in range(layer.local_num_experts):
            here = f"{name}.{expert}."
            # vLLM pads each expert's share of rows and columns to whole blocks with zeros.
            gate, up = (self._padded(self._shard(f"{here}{part}_proj.weight"), rows=True) for part in ("gate", "up"))
            yield torch.cat([gate, up]), layer.w13_weight.data[expert], layer.w13_weight_scale_inv.data[expert], packed
            down = self._padded(self._shard(f"{here}down_proj.weight"), rows=False)
            yield down, layer.w2_weight.data[expert], layer.w2_weight_scale_inv.data[expert], packed

    def _shard(self, name):
        rank, ranks = self.place
        return self.weights[name].chunk(ranks, dim=int(name.split(".")[-2] in BY_COLUMNS))[rank].contiguous()

    def _padded(self, weight, rows):
        missing = -weight.shape[0 if rows else 1] % 128
        return torch.nn.functional.pad(weight, (0, 0, 0, missing) if rows else (0, missing))


def same_bits(a, b):
    """Whether two tensors are of one type and shape, and equal to the bit."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )
