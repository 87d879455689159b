"""An FP8 checkpoint for Hugging Face and vLLM, and the proof that it is right.

    .venv/bin/python examples/export.py

You see which linears went to FP8, how much smaller the checkpoint is, and a certificate: every code and scale is that
of the specification, every tensor that stays in BF16 has the source's bytes.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import LlamaConfig, LlamaForCausalLM

from nemo_fp8 import preset
from nemo_fp8.export import HuggingFace, export, verify

with TemporaryDirectory() as folder:
    source, target = Path(folder, "bf16"), Path(folder, "fp8")
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(source)

    done = export(HuggingFace.open(source), target, preset("bf16_with_fp8_blockwise_mixed").replace(first_layers=1))
    print(f"{len(done.plan.selection.quantized)} weights in FP8, the first layer in BF16 as the contract asks")
    sizes = [sum(file.stat().st_size for file in place.glob("*.safetensors")) for place in (source, target)]
    print(f"{sizes[0] / 1e6:.1f} MB in BF16, {sizes[1] / 1e6:.1f} MB in FP8")
    proof = verify(done.plan, target)
    wrong = proof.codes_wrong + proof.scales_wrong
    print(f"{proof.codes} codes and {proof.scales} scales compared, {wrong} wrong: holds is {proof.holds}")
