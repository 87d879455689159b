"""NeMo RL: write and read its YAML.

One file there holds both sides: ``policy.megatron_cfg`` trains, ``policy.generation.vllm_cfg`` generates. The kind of
scales is an environment variable for the first and a key for the second, and nothing in NeMo RL compares them. Reading
a file here gives both sides, and ``from_nemo_rl`` gives one contract or says why there is none.

A file is read with the files that it extends (:mod:`nemo_fp8.render.nemo_rl_file`). What is not there has NeMo RL's
default, so an overlay reads like the file that it extends. The exception is what NeMo RL's base files set
(``grad_reduce_in_fp32``); for this the contract's default is taken.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nemo_fp8.contract import Precision
from nemo_fp8.contract.te_variables import VARIABLES, te_environment
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.findings import finding
from nemo_fp8.models.shapes import Model
from nemo_fp8.preflight import agreement
from nemo_fp8.render import nemo_rl_backend as backend
from nemo_fp8.render import nemo_rl_fp4 as fp4
from nemo_fp8.render import nemo_rl_keys as keys
from nemo_fp8.render import nemo_rl_lists as lists
from nemo_fp8.render.env import fields_from_environment
from nemo_fp8.render.nemo_rl_keys import section
from nemo_fp8.render.rendering import Rendering, lost_fields
from nemo_fp8.render.settings import read
from nemo_fp8.render.te_precision import from_te_precision, to_te_precision

if TYPE_CHECKING:
    from nemo_fp8.render.nemo_rl_file import Source

_REASONS = {
    "keep": "NeMo RL leaves modules out of FP8 in the rollout only, in 128x128 blocks by plain words in their names.",
    "modules": "NeMo RL's rollout has one format, and lists of what stays in the compute dtype beside it; what the "
    "lists cannot name runs in that format.",
    "backward_scaling": "NeMo RL has no key for it: Megatron's recipes have one format for both directions.",
    "strict": "NeMo RL fails in the first step on a shape that FP8 cannot hold.",
    **dict.fromkeys(
        ("margin", "amax_history_len", "amax_compute_algo"), "NeMo RL has no key for it: Megatron's default is used."
    ),
    **dict.fromkeys(("attention", "multi_head_attention", "wgrad"), "NeMo RL has no key for it."),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "NeMo RL scales no loss.",
    ),
}


# ---------------------------------------------------------------------- contract -> NeMo RL


def to_nemo_rl(precision: Precision, layers: int | None = None) -> dict[str, Any]:
    """Return the sections of a NeMo RL configuration for a contract.

    ``layers`` is the number of the model's decoder layers, which NVFP4 rollouts need to name the last ones. Raises
    PrecisionError for settings that NeMo RL would carry out differently.
    """
    p = precision
    refused = [*_cannot_mean(p)]
    if refused:
        raise PrecisionError(refused)
    megatron: dict[str, Any] = {
        "distributed_data_parallel_config": {"grad_reduce_in_fp32": p.grad_reduce == "fp32"},
        "fp8_cfg": {"enabled": p.is_fp8}
        | ({"fp8": p.format, "fp8_recipe": p.scaling, "fp8_param": p.fp8_param} if p.is_fp8 else {}),
        "env_vars": te_environment(p),
    }
    if p.scaling == "nvfp4":
        megatron["fp4_cfg"] = {"enabled": True} | keys.FP4_CFG
    if p.modules and p.is_quantized:
        megatron[keys.TE_PRECISION] = keys.TE_PRECISION_FILE
    if p.is_quantized and (p.first_layers or p.last_layers):
        megatron["first_last_layers_bf16"] = True
        megatron |= {name: setting.write(getattr(p, setting.field)) for name, setting in keys.LAYERS.items()}
    vllm: dict[str, Any] = {"precision": {v: k for k, v in keys.DTYPES.items()}[p.compute], "kv_cache_dtype": "auto"}
    if p.rollout == "fp8":
        vllm = {"precision": "fp8", "is_mx": p.rollout_block == "1x32"}
        vllm |= {name: s.write(getattr(p, s.field)) for name, s in keys.VLLM_CFG.items() if not s.alias}
        # An empty list says something, too: it takes the place of the list in the file that this one extends.
        mx = vllm["is_mx"]
        kept = [*filter(None, (lists.line_of_name(pattern, mx) for pattern in p.keep))]
        vllm[keys.IGNORED[mx]] = [*dict.fromkeys([*kept, *lists.lines_of_rules(p, mx)])]
    generation: dict[str, Any] = {"vllm_cfg": vllm}
    if p.rollout == "nvfp4":
        ignored = [*dict.fromkeys([*fp4.ignored_experts(p, layers), *lists.experts_of_rules(p)])]
        generation["nvfp4_pertoken_rollout"] = {"enabled": True, "additional_ignore": ignored}
    return {
        "loss_fn": {"use_importance_sampling_correction": p.importance_sampling},
        "policy": {
            "precision": {v: k for k, v in keys.DTYPES.items()}[p.compute],
            "megatron_cfg": megatron,
            "generation": generation,
        },
    }


def render(precision: Precision, layers: int | None = None) -> Rendering:
    """Render an overlay for a NeMo RL configuration, with Megatron's file of recipes where the contract has rules.

    ``layers`` is the number of the model's decoder layers.
    """
    data = to_nemo_rl(precision, layers)
    recipes = to_te_precision(precision) if precision.modules and precision.is_quantized else None
    text = yaml.safe_dump(data, sort_keys=False)
    train, rollout = read_nemo_rl(text, recipes)
    back = agreement.merge(train, rollout)
    if precision.is_quantized and precision.keep:
        back = Precision(**back.to_dict() | {"keep": ()})  # NeMo RL can tell the rollout at most, never the training
    if precision.modules:
        back = _with_rules(precision, back, train, rollout, lines_of(data))
    lost, notes = lost_fields(precision, back, _REASONS, "NeMo RL")
    if recipes is not None:
        text += f"# {keys.TE_PRECISION_FILE}, as `nemo-fp8 render ... --to te-precision` writes it:\n"
        text += "".join(f"#   {line}\n" for line in yaml.safe_dump(recipes, sort_keys=False).splitlines())
    if precision.rollout == "nvfp4":
        notes.append(
            "NeMo RL generates in NVFP4 with routed experts alone (of Qwen3-MoE, on Blackwell, without expert "
            "parallelism); everything else stays in BF16 there."
        )
    if precision.is_quantized and (precision.first_layers or precision.last_layers):
        notes.append(
            "Only a NeMo RL that hands first_last_layers_bf16 to Megatron (its pull request 4126) keeps these layers "
            "in training."
        )
    if precision.fp8_param:
        notes.append("fp8_param=true was seen to give NaN in NeMo RL (its issue 1164).")
    return Rendering("nemo-rl", text, data, tuple(notes), lost)


def lines_of(data: Mapping[str, Any]) -> lists.Lists:
    """Return what a rendering leaves out of the quantized rollout."""
    generation = data["policy"]["generation"]
    found = {mx: generation["vllm_cfg"].get(name, []) for mx, name in keys.IGNORED.items()}
    return found | {True: found[True] + generation.get("nvfp4_pertoken_rollout", {}).get("additional_ignore", [])}


def _with_rules(p: Precision, back: Precision, train: Precision, rollout: Precision, lines: lists.Lists) -> Precision:
    """Return what came back with the contract's rules, if both sides obey them; without any if one does not."""
    if p.is_quantized:  # the file of recipes has the names to keep before the rules
        trained = train.modules == (*((name, p.compute) for name in p.keep), *p.modules)
        kept = back.keep
    else:  # the lists alone do not tell the lines of rules from those of names to keep
        trained = True
        experts = p.rollout == "nvfp4"
        kept = tuple(
            k for k in p.keep if any(lists.line_of_name(k, mx, experts) in found for mx, found in lines.items())
        )
    own, theirs = (
        {f.code for f in agreement.check(train=a, rollout=b).findings} for a, b in ((p, p), (train, rollout))
    )
    apart = (theirs - own) & {"sides-recipes", "sides-layers", "sides-modules"}
    obeyed = trained and not lists.unsaid(p, lines) and not (apart and not p.keep)
    return Precision(**back.to_dict() | {"keep": kept, "modules": p.modules if obeyed else ()})


def _cannot_mean(p: Precision) -> Iterator[Problem]:
    """Yield settings that NeMo RL would not leave out but carry out differently."""
    attention = ("decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.self_attention.linear_proj")
    if p.rollout == "nvfp4" and any(p.of([name]).rollout == "nvfp4" for name in attention):
        yield Problem(
            "NVFP4 attention in NeMo RL's rollout.",
            "nvfp4_pertoken_rollout holds routed experts in NVFP4 and nothing else.",
            f"Set modules={keys.EXPERTS_ALONE!r}, or rollout='compute', or render to vllm.",
        )
    if p.rollout == "nvfp4" and p.activation_scheme == "none":
        yield Problem(
            "activation_scheme='none' in NeMo RL's NVFP4 rollout.",
            "nvfp4_pertoken_rollout rounds the activations of each token; its W4A16 comes from ModelOpt (quant_cfg).",
            "Set activation_scheme='dynamic', or render to vllm.",
        )
    if p.rollout == "fp8" and p.rollout_block == "tensor":
        yield Problem(
            "rollout_block='tensor' in NeMo RL.",
            "Its FP8 rollout has 128x128 blocks or MX blocks, and nothing else.",
            "Set rollout_block='128x128', or render to vllm.",
        )
    if p.rollout != "fp8" and p.kv_cache == "fp8":
        yield Problem(
            "kv_cache='fp8' without an FP8 rollout in NeMo RL.",
            "It refuses an FP8 KV cache unless vllm_cfg.precision is 'fp8'.",
            "Set rollout='fp8', or kv_cache='auto'.",
        )


# ---------------------------------------------------------------------- NeMo RL -> contract


def read_nemo_rl(
    source: Source, recipes: Mapping[str, Any] | None = None, layers: int | None = None
) -> tuple[Precision, Precision]:
    """Return the training side and the rollout side of a NeMo RL configuration, each as a contract.

    ``source`` is a file, read with the files that it extends, a text or a mapping. ``recipes`` is the content of
    Megatron's file of recipes by module; without it the file is read that ``te_precision_config_file`` names.
    ``layers`` is the model's number of them, without which the last ones of an NVFP4 rollout's list count as its last.
    The rollout of a backend whose settings are not read says its compute dtype alone (``check_nemo_rl`` compares
    nothing then). Raises PrecisionError for misspelt keys, values that a contract cannot express, what NeMo RL refuses,
    and files that cannot be read.
    """
    from nemo_fp8.render.nemo_rl_file import read_document, resolving  # rendering needs no OmegaConf

    document = read_document(source)
    with resolving():
        mistyped = [*keys.mistyped(document)]
        if mistyped:
            raise PrecisionError(mistyped)
        problems = [*_slips(document), *backend.zero_mismatch(document)]
        train, wrong = _train(document, recipes or fp4.recipes_beside(source, document))
        problems += wrong
        rollout, wrong = _rollout(document, train, layers)
        problems += wrong
    if problems:
        raise PrecisionError(problems)
    return Precision(**train), Precision(**rollout)


def from_nemo_rl(source: Source) -> Precision:
    """Return one contract for both sides. Raises PrecisionError with every setting in which they differ."""
    sides = read_nemo_rl(source)
    how = _comparison(source)
    if isinstance(how, Problem):
        raise PrecisionError([how])
    return agreement.join(*sides) if how == "vllm" else agreement.merge(*sides)


def check_nemo_rl(source: Source, model: str | Path | None = None) -> agreement.Agreement | None:
    """Compare both sides of a configuration; None if the rollout's settings are not read.

    ``model`` is the config.json of the model, or its folder: with it, its linears are compared.

    ``beside_the_contract`` says why not. Megatron agrees with itself: it generates with the trained model. Raises
    PrecisionError as ``read_nemo_rl`` does.
    """
    known = Model.read(model) if model is not None else None
    train, rollout = read_nemo_rl(source, layers=known.layers if known else None)
    how = _comparison(source)
    if isinstance(how, Problem):
        return None
    if how == "megatron":
        return agreement.Agreement(())
    found = agreement.check(train=train, rollout=fp4.of_model(rollout) if known else rollout, model=known)
    return agreement.Agreement((*fp4.missing(train, rollout), *found.findings))


def _comparison(source: Source) -> str | Problem:
    """Return the backend with which training is compared, or the finding that it is not."""
    from nemo_fp8.render.nemo_rl_file import read_document, resolving

    document = read_document(source)
    with resolving():
        return backend.not_compared(document) or backend.of(document)


def ignored_by_nemo_rl(source: Source) -> list[Problem]:
    """Return problems for keys that NeMo RL ignores here; this package reads them as they were meant.

    Raises PrecisionError if ``source`` cannot be read, or is no config of NeMo RL.
    """
    from nemo_fp8.render.nemo_rl_file import read_document, resolving

    document = read_document(source)
    found = []
    with resolving():
        fp8_cfg = section(document, "policy", "megatron_cfg", "fp8_cfg")
        vllm_cfg = section(document, "policy", "generation", "vllm_cfg")
    if fp8_cfg and "enabled" not in fp8_cfg:
        found.append(finding("nemo-rl-not-enabled", "policy.megatron_cfg.fp8_cfg"))
    for name, setting in keys.VLLM_CFG.items():
        if setting.alias and name in vllm_cfg:
            right = next(n for n, s in keys.VLLM_CFG.items() if s.field == setting.field)
            key = f"policy.generation.vllm_cfg.{name}"
            found.append(finding("nemo-rl-not-read", key, key=key, right=right))
    return found


def beside_the_contract(source: Source) -> list[Problem]:
    """Return findings for what acts beside everything that a contract says, and for a rollout that is not compared.

    Raises PrecisionError if ``source`` cannot be read, or is no config of NeMo RL.
    """
    from nemo_fp8.render.nemo_rl_file import read_document, resolving

    document = read_document(source)
    with resolving():
        return [*_modelopt(document), *backend.beside(document)]


def _modelopt(document: Mapping[str, Any]) -> Iterator[Problem]:
    train, rollout = (section(document, *path).get("quant_cfg") for path in keys.MODELOPT)
    if train is None and rollout is None:
        return
    key = ".".join((*keys.MODELOPT[0 if train is not None else 1], "quant_cfg"))
    rule = "nemo-rl-modelopt" if train == rollout else "nemo-rl-modelopt-differs"
    yield finding(rule, key, key=key, train=train, rollout=rollout)


def _train(document: Mapping[str, Any], recipes: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[Problem]]:
    megatron = section(document, "policy", "megatron_cfg")
    fp8_cfg = dict(section(document, "policy", "megatron_cfg", "fp8_cfg"))
    known = (*keys.FP8_CFG, *keys.FP8_CFG_OTHERS)
    problems = [unknown("key in policy.megatron_cfg.fp8_cfg:", name, known) for name in fp8_cfg if name not in known]
    fields: dict[str, Any] = {"compute": _compute(document, problems), "rollout": "compute"}
    reduce = section(document, "policy", "megatron_cfg", "distributed_data_parallel_config").get("grad_reduce_in_fp32")
    if reduce is not None:
        fields["grad_reduce"] = "fp32" if reduce else "compute"
    four, wrong = fp4.is_trained(document, eight := bool(fp8_cfg) and bool(fp8_cfg.get("enabled", True)))
    problems += wrong
    if (four or eight) and megatron.get("first_last_layers_bf16"):
        fields |= {setting.field: megatron.get(name, setting.default) for name, setting in keys.LAYERS.items()}
    if (four or eight) and recipes:
        fields["modules"] = from_te_precision(recipes, fields["compute"], fp8_cfg.get("fp8") if eight else None)
    by_rule = [recipe for _, recipe in fields.get("modules", ())]
    said, wrong = _environment(document, "nvfp4" if four else fp8_cfg.get("fp8_recipe"), by_rule)
    problems += wrong
    if four:
        return fields | {"format": "e2m1", "scaling": "nvfp4"} | said, problems
    if not eight:
        return fields, problems
    missing = [name for name in ("fp8", "fp8_recipe") if name not in fp8_cfg]
    if missing:
        problems.append(
            Problem(
                f"policy.megatron_cfg.fp8_cfg lacks {' and '.join(missing)}.",
                "NeMo RL has no default for it and stops with a KeyError.",
                "Give fp8: e4m3 and fp8_recipe: blockwise (or others of their values).",
            )
        )
    chosen, wrong = read(keys.FP8_CFG, {k: v for k, v in fp8_cfg.items() if k in keys.FP8_CFG})
    return fields | chosen | said, problems + wrong


def _environment(
    document: Mapping[str, Any], scaling: str | None, by_rule: Iterable[str]
) -> tuple[dict[str, Any], list[Problem]]:
    variables = section(document, "policy", "megatron_cfg", "env_vars")
    ours = [*VARIABLES]
    slips = [name for name in variables if name not in ours and difflib.get_close_matches(name, ours, cutoff=0.9)]
    if slips:
        return {}, [unknown("variable in policy.megatron_cfg.env_vars:", name, ours) for name in slips]
    return fields_from_environment(scaling, {k: str(v) for k, v in variables.items()}, by_rule), []


def _rollout(
    document: Mapping[str, Any], train: Mapping[str, Any], layers: int | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the fields of the rollout, and problems with its settings; ``train`` are the fields of the training."""
    correction = section(document, "loss_fn").get("use_importance_sampling_correction") or False
    fields: dict[str, Any] = {"compute": _compute(document, []), "importance_sampling": correction}
    if backend.not_compared(document):
        return fields | {"rollout": "compute"}, []
    if backend.of(document) == "megatron":
        return backend.as_trained(train) | fields, []
    vllm_cfg = section(document, "policy", "generation", "vllm_cfg")
    said, problems = read(keys.VLLM_CFG, {k: vllm_cfg[k] for k in keys.VLLM_CFG if vllm_cfg.get(k) is not None})
    precision = vllm_cfg.get("precision", "auto")
    problems += _of_mx_rollouts(vllm_cfg)
    if precision == "fp8":
        mx = bool(vllm_cfg.get("is_mx"))
        scale = "pow2" if mx else "fp32"
        lines = {mx: vllm_cfg.get(key) or () for mx, key in keys.IGNORED.items()}
        keep, modules = lists.rules_of_lines(lines, train.get("modules", ()), fields["compute"])
        fields |= {"rollout": "fp8", "rollout_block": "1x32" if mx else "128x128", "keep": keep, "modules": modules}
        return fields | {"weight_scale": scale, "activation_scale": scale} | said, problems
    if precision in keys.DTYPES:
        fields["compute"] = keys.DTYPES[precision]
    elif precision != "auto":
        problems.append(
            unknown("value for policy.generation.vllm_cfg.precision:", precision, (*keys.DTYPES, "fp8", "auto"))
        )
    four = section(document, "policy", "generation", "nvfp4_pertoken_rollout")
    problems += [
        unknown(f"key in {keys.FP4_ROLLOUT}:", name, keys.FP4_ROLLOUT_KEYS)
        for name in four
        if name not in keys.FP4_ROLLOUT_KEYS
    ]
    if four.get("enabled"):
        # The rules first: a single layer that one of them names is no last layer.
        ignored, rules = {True: four.get("additional_ignore") or ()}, train.get("modules", ())
        keep, modules = lists.rules_of_lines(ignored, rules, fields["compute"], nvfp4=True)
        return fields | {"rollout": "nvfp4", "modules": modules} | fp4.kept_experts(keep, layers), problems
    # NeMo RL reads FP8 keys only with precision: fp8. Keys that ask for FP8 without it are contradictions.
    claims = {k: v for k, v in said.items() if k in ("deep_gemm", "kv_cache")}
    if claims.get("kv_cache") == "fp8":
        problems.append(
            Problem(
                "policy.generation.vllm_cfg.kv_cache_dtype is fp8 without precision: fp8.",
                "NeMo RL refuses an FP8 KV cache beside other weights.",
                "Set precision: fp8, or kv_cache_dtype: auto.",
            )
        )
    return fields | {"rollout": "compute"} | claims, problems


def _of_mx_rollouts(vllm_cfg: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each key that NeMo RL takes with an MX rollout and refuses with any other."""
    patterns, section = keys.IGNORED[True], "policy.generation.vllm_cfg"
    quantized, mx = vllm_cfg.get("precision") == "fp8", bool(vllm_cfg.get("is_mx"))
    if vllm_cfg.get(keys.PREQUANTIZE) and not (quantized and mx):
        yield Problem(
            f"{section}.{keys.PREQUANTIZE} without precision: fp8 and is_mx: true.",
            "NeMo RL quantizes ahead of a refit for MX rollouts only, and refuses it otherwise.",
            f"Set precision: fp8 and is_mx: true, or leave {keys.PREQUANTIZE} out.",
        )
    if vllm_cfg.get(patterns) and quantized and not mx:
        yield Problem(
            f"{section}.{patterns} without is_mx: true.",
            "NeMo RL refuses it for 128x128 blocks.",
            f"Name the modules by words in {keys.IGNORED[False]}, or set is_mx: true.",
        )


def _compute(document: Mapping[str, Any], problems: list[Problem]) -> str:
    name = section(document, "policy").get("precision") or "bfloat16"
    if name not in keys.DTYPES:
        problems.append(unknown("value for policy.precision:", name, keys.DTYPES))
    return keys.DTYPES.get(name, "bf16")


def _slips(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield keys of the open sections that are misspelt keys of ours."""
    for path, ours in keys.OPEN_SECTIONS.items():
        for name in section(document, *path):
            if (
                name not in ours
                and name not in keys.NOT_SLIPS
                and difflib.get_close_matches(str(name), ours, cutoff=0.85)
            ):
                yield unknown(f"key in {'.'.join(path)}:", name, ours)
