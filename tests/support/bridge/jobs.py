"""The runs of tests/bridge by name: those of one process, and those of two. ``{folder}`` is a folder of the session."""

import itertools

DELAYED, TENSORWISE, BLOCKWISE, MXFP8, NVFP4 = (
    "bf16_with_fp8_delayed_scaling_mixed",
    "bf16_with_fp8_current_scaling_mixed",
    "bf16_with_fp8_blockwise_mixed",
    "bf16_with_mxfp8_mixed",
    "bf16_with_nvfp4_mixed",
)
FP8 = {"delayed": DELAYED, "tensorwise": TENSORWISE, "blockwise": BLOCKWISE, "mxfp8": MXFP8}
QUANTIZED = FP8 | {"nvfp4": NVFP4}
STORED = {"delayed": DELAYED, "tensorwise": TENSORWISE, "mxfp8": MXFP8}
"""Presets whose weights lie in FP8."""
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
LATER = {"checkpoint": {"async_save": True}}
"""Checkpoints are written while training goes on."""
LLAMA = {"hf": "{folder}/llama"}
ADAPTED = LLAMA | {"base": "{folder}/base", "adapters": {"dim": 32}}
"""Bridge's LoRA on a checkpoint of Megatron's, which ``IMPORTED`` made of Hugging Face's."""
IMPORTED = LLAMA | {"imported": "{folder}/base"}
FEW = {"steps": 3}
FINE_TUNED = {"finetune": True, "load_optim": False, "load_main_params_from_ckpt": True}
"""Bridge's own way into FP8 weights whose masters are exact: from a checkpoint of Megatron's, ``IMPORTED``."""

RULED = {
    "format": "e4m3",
    "scaling": "blockwise",
    "modules": [["*.linear_proj", "bf16"], ["*.linear_fc1", "mxfp8"], ["*.layers.1.*", "tensorwise"]],
}
"""Rules for modules: carried out by the package's hooks, or by Megatron from the file that is rendered for it."""

_MODULES = {
    "configs": {
        "mx": {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {
                "fp8_quantization_recipe": "mxfp8",
                "fp8_format": "e4m3",
                "override_quantized_autocast": True,
                "override_nonquantized_autocast": False,
            },
        },
        "plain": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}},
    },
    "matchers": {
        "proj": {"config": "plain", "type": "glob", "pattern": "*.linear_proj", "enabled": True},
        "fc1": {"config": "mx", "type": "glob", "pattern": "*.linear_fc1", "enabled": True},
    },
}


def _kept(layer):
    """Delayed scaling with FP8 weights, but for one layer's MLP."""
    return {"format": "hybrid", "scaling": "delayed", "fp8_param": True, "keep": [f"*.layers.{layer}.mlp.*"]}


def _resumed(name, saving=None, **job):
    folder = f"{{folder}}/{name}"
    yield f"{name}-whole", job | {"steps": 4}
    yield f"{name}-first", job | {"steps": 2, "of": 4, "save": folder} | (saving or {})
    yield f"{name}-second", job | {"steps": 4, "load": folder}


ALONE = {
    # Bridge's own way to load, before the registry holds our names; and with a random initialization.
    "plain-loaded": {"precision": DELAYED, **LLAMA, **FEW},
    "plain-loaded-over-random": {
        "precision": MXFP8,
        **LLAMA,
        "model": {"perform_initialization": True},
        **FEW,
    },
    "imported": IMPORTED,
    "fine-tuned": {"precision": DELAYED, **LLAMA, "base": "{folder}/base", "checkpoint": FINE_TUNED, **FEW},
    "bf16": {"registered": True},
    **{name: {"registered": True, "precision": preset.replace("_", "-")} for name, preset in QUANTIZED.items()},
    "watched": {"contract": BLOCKWISE, "steps": 2, "monitor": 2, "tensorboard": "{folder}/board"},
    **{f"{kind}": {"contract": BLOCKWISE, "kind": kind, **FEW} for kind in ("llama", "qwen3")},
    "kept": {"contract": _kept(1), **FEW},
    "modules": {"contract": {"format": "e4m3", "scaling": "blockwise"}, "recipe": _MODULES, **FEW},
    "ruled": {"contract": RULED, **FEW},
    "ruled-by-megatron": {"contract": {k: v for k, v in RULED.items() if k != "modules"}, "rules": RULED, **FEW},
    "hybrid": {
        "contract": {"format": "e2m1", "scaling": "nvfp4", "weight_block": "1x16", "backward_scaling": "mxfp8"},
        **FEW,
    },
    "fp16": {"contract": "fp16_mixed", "override": {"initial_loss_scale": 2.0**14}},
    "fp16-begun-too-high": {
        "contract": "fp16_with_mxfp8_mixed",
        "override": {"initial_loss_scale": 2.0**20, "hysteresis": 1},
        "steps": 7,
    },
    **dict(_resumed("tensorwise-resumed", contract=TENSORWISE, saving=LATER)),
    **{f"{name}-loaded": {"contract": preset, **LLAMA, **FEW} for name, preset in STORED.items()},
    "bf16-loaded": {"contract": "bf16_mixed", **LLAMA, **FEW},
    "qwen3-loaded": {"contract": MXFP8, "hf": "{folder}/qwen3", **FEW},
    "plain-loaded-exactly": {"precision": DELAYED, **LLAMA, "exactly": True, **FEW},
    "adapted": {"contract": _kept(1), "monitor": 2, **ADAPTED, **FEW},
    **dict(_resumed("adapted-resumed", contract=DELAYED, **ADAPTED)),
    # Refusals.
    "unrepaired": {"contract": DELAYED, "written": True},
    "unknown": {"precision": "bf16_with_fp8_blokwise_mixed"},
    "contradiction": {"contract": DELAYED, "override": {"fp8_recipe": "mxfp9"}},
    "another-contradiction": {"contract": BLOCKWISE, "override": {"fp8": None}},
    "no-such-rule": {"contract": {"format": "e4m3", "scaling": "mxfp8", "modules": [["*.linear_fc7", "bf16"]]}},
    "no-such-module": {"contract": {"format": "e4m3", "scaling": "blockwise", "keep": ["*.linear_fc7"]}},
    "over-ranks": {"contract": "bf16_mixed", "model": {"context_parallel_size": 2}},
    "all-kept": {"contract": {"format": "e4m3", "scaling": "blockwise", "first_layers": 2, "last_layers": 2}},
}
PAIR = {
    "bf16": {"registered": True},
    "blockwise": {"contract": BLOCKWISE},
    "mxfp8": {"contract": MXFP8},
    "nvfp4": {"contract": NVFP4, **FEW},
    "mxfp8-overlapped": {"contract": MXFP8, "ddp": OVERLAPPED},
    "tensorwise-experts": {
        "contract": TENSORWISE,
        "experts": True,
        "model": {"expert_model_parallel_size": 2, "moe_router_padding_for_fp8": True},
        **FEW,
    },
    **{
        f"{name}-loaded": {"contract": preset, **LLAMA, "model": SPLIT, **FEW}
        for name, preset in {"bf16": "bf16_mixed", "delayed": DELAYED}.items()
    },
    "exported": {"contract": MXFP8, **LLAMA, "export": "{folder}/exported.safetensors", **FEW},
    **dict(_resumed("delayed-resumed", contract=DELAYED)),
    **dict(_resumed("delayed-split", contract=DELAYED, model=SPLIT)),
    "delayed-validated": {"contract": DELAYED, "validate": 1},
    "delayed-pipeline": {"contract": _kept(3), "model": PIPELINE, **FEW},
}


def _everywhere():
    """Layout -> every recipe on it, resumed where ranks hold parts of the model: the matrix that takes minutes."""
    layouts = {
        "split": {"model": SPLIT},
        "pipeline": {"model": PIPELINE, "saving": LATER},
        "adapted": {"model": SPLIT, **ADAPTED},
        "data": {},
        "overlapped": {"ddp": OVERLAPPED},
        "validated": {"validate": 1},
        "experts": {"experts": True, "model": {"expert_model_parallel_size": 2}},
    }
    recipes = {"bf16": "bf16_mixed"} | QUANTIZED
    found = {layout: {} for layout in layouts}
    found["adapted"]["imported"] = IMPORTED
    for (layout, job), (name, preset) in itertools.product(layouts.items(), recipes.items()):
        padded = {"moe_router_padding_for_fp8": True} if layout == "experts" and name != "bf16" else {}
        job = job | {"contract": preset, "model": job.get("model", {}) | padded}
        resumed = layout in ("split", "pipeline", "adapted")
        found[layout] |= dict(_resumed(f"{name}-{layout}", **job)) if resumed else {f"{name}-{layout}": job}
    return found


EVERYWHERE = _everywhere()


def in_folder(jobs, folder):
    """The jobs with the folder of a session in the place of ``{folder}``."""
    return [
        {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in job.items()}
        for job in jobs.values()
    ]
