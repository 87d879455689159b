"""vLLM's own online quantization: what a contract asks of it, layer by layer, and what it cannot do.

    quantization="fp8_per_block" or "mxfp8"    one scheme for every linear, without those in ``ignore``
    quantization="online"                      ``targets``: pattern -> scheme; a layer that none matches stays in BF16

A contract tries its rules in order, and vLLM refuses a layer that two patterns match. So each pattern, of ``targets``
and of ``ignore``, first excludes those before it. With ``keep=("*.o_proj",)`` and ``modules=(("*.self_attn.*",
"mxfp8"),)`` in a contract of 128x128 blocks, written as globs:

    ignore     *.o_proj
    targets    not *.o_proj, *.self_attn.*           mxfp8
               not *.o_proj, not *.self_attn.*, *    fp8_per_block

``targets`` begin with :data:`_LINEARS`, since vLLM ends where one matches what is no linear, its attention among them.
They are read back in the same order. vLLM knows its own names alone, experts of a layer as one, and no shapes; where
that makes a difference in any family, or the scales do, the contract needs our plugin, and :func:`why_plugin` says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_fp8.contract import Precision
from nemo_fp8.errors import PrecisionError, Problem, unknown
from nemo_fp8.models.one_naming import apart_in_vllm
from nemo_fp8.render.rendering import leading_as_kept, names_and_rules

ONLINE = "online"
# vLLM's online quantization by weight block, its scales, and the rule whose rollout it is. One scale a weight is not
# among them: there vLLM scales activations by token or by tensor, as the machine's kernel takes them.
STOCK = {"128x128": "fp8_per_block", "1x32": "mxfp8"}
STOCK_SCALES = {"128x128": "fp32", "1x32": "pow2"}
_RECIPES = {"fp8_per_block": "tensorwise", "mxfp8": "mxfp8"}
# Layers of a decoder, without vLLM's attention, and without routers, which no contract quantizes.
_LINEARS = r"(?=.*(?:layers|h)\.\d+\.)(?!.*\.(?:attn|gate|router|shared_expert_gate)$)"
_PLUGIN = "Load nemo_fp8's plugin, as to_vllm does by itself."


def why_plugin(precision: Precision) -> list[Problem]:
    """Return what stock vLLM cannot do of a quantized rollout: a problem for each reason."""
    p = precision
    kept = [*p.keep, *(pattern for pattern, _ in p.modules)]
    problems = [*_not_plain(p)]
    if p.first_layers or p.last_layers or p.strict:
        problems.append(
            Problem(
                f"first_layers={p.first_layers}, last_layers={p.last_layers}, strict={p.strict} in stock vLLM.",
                "It counts no layers, and knows no shapes before it loads a weight.",
                f"Name the layers in keep, as in keep=('model.layers.0.*',). {_PLUGIN}",
            )
        )
    if any("[" in pattern for pattern in kept if not pattern.startswith("re:")):
        problems.append(_named("a set of characters in a glob", "It is translated to a regular expression for vLLM"))
    elif p.modules and any(re.search(r"\\[1-9]|\(\?P", pattern) for pattern in kept):
        problems.append(_named("a group that is named or referred to", "Rules are joined to one regular expression"))
    elif at := next(apart_in_vllm(p), None):
        problems.append(_named(at, "It knows its own names alone, and the parts of a fused layer have to be alike"))
    return problems


def _named(what: str, why: str) -> Problem:
    return Problem(
        f"{what}, in keep or modules, for stock vLLM.",
        f"{why}.",
        f"Write the names of whole layers of vLLM's, such as '*.self_attn.*' or 'model.layers.2.*'. {_PLUGIN}",
    )


def _not_plain(p: Precision) -> Iterator[Problem]:
    """Yield a problem for each format that vLLM has not: of the contract, even where rules leave it no module, since it
    ends the list of targets; and of its rules."""
    for own in dict.fromkeys((p.replace(modules=()), *p.variants())):
        scale = STOCK_SCALES.get(own.rollout_block)
        if own.rolls_out_quantized and not (
            own.activation_scheme == "dynamic" and own.weight_scale == own.activation_scale == scale
        ):
            recipe = f"A rule {own.scaling!r}" if own.scaling != p.scaling else "The contract"
            yield Problem(
                f"{recipe} (rollout={own.rollout!r}, rollout_block={own.rollout_block!r}, "
                f"weight_scale={own.weight_scale!r}, activation_scale={own.activation_scale!r}) in stock vLLM.",
                "It quantizes linears in 128x128 blocks with FP32 scales, or in 1x32 blocks, and nothing else.",
                "Give a rule 'tensorwise' (in a rollout, 128x128 blocks with FP32 scales) or 'mxfp8', and the contract "
                f"one of these blocks and scales. {_PLUGIN}",
            )


# ---------------------------------------------------------------------- engine arguments


def to_online(precision: Precision) -> dict[str, Any]:
    """Return the arguments ``quantization`` and ``quantization_config`` of stock vLLM.

    Raises PrecisionError with everything of the contract that it cannot do.
    """
    problems = why_plugin(precision)
    if problems:
        raise PrecisionError(problems)
    p = leading_as_kept(precision)
    if not p.modules:
        ignored = {"quantization_config": {"ignore": [pattern_to_regex(pattern) for pattern in p.keep]}}
        return {"quantization": STOCK[p.rollout_block]} | (ignored if p.keep else {})
    ignore, targets, before = [], {}, ""
    for pattern, recipe in (*((pattern, p.compute) for pattern in p.keep), *p.modules):
        own = pattern_to_regex(pattern)[3:]
        if recipe == p.compute:
            ignore.append(f"re:{before}{own}")
        else:
            targets[f"re:{_LINEARS}{before}{own}"] = _scheme(p, pattern, recipe)
        before += f"(?!{own})"
    targets[f"re:{_LINEARS}{before}.*"] = STOCK[p.rollout_block]
    return {"quantization": ONLINE, "quantization_config": {"targets": targets, "ignore": ignore}}


def _scheme(p: Precision, pattern: str, recipe: str) -> str:
    """Return vLLM's name for what a rule gives a module; one for the contract's own recipe gives its own blocks."""
    return STOCK[p.replace(modules=((pattern, recipe),)).of([pattern]).rollout_block]


def as_read(precision: Precision) -> Precision:
    """Return the contract as :func:`from_online` reads what :func:`to_online` wrote: the first rules for the compute
    dtype among the names to keep, and rules for the contract's own recipe by the name that vLLM's scheme has here."""
    p = leading_as_kept(precision)
    rules = tuple(
        (pattern, _RECIPES[_scheme(p, pattern, recipe)] if recipe == p.scaling else recipe)
        for pattern, recipe in p.modules
    )
    return p.replace(modules=rules)


def from_online(quantization: str, config: Mapping[str, Any], compute: str) -> dict[str, Any]:
    """Return the contract's fields of these two arguments of vLLM's.

    ``targets`` that vLLM would accept match no layer twice, so their order means nothing; what none of them matches
    stays in the compute dtype. Raises PrecisionError for what a contract cannot describe.
    """
    targets, ignore = dict(config.get("targets") or {}), [*config.get("ignore", ())]
    problems = [
        unknown("key in vLLM's quantization_config:", name, ("targets", "ignore"))
        for name in config
        if name not in ("targets", "ignore")
    ]
    problems += [unknown("scheme in targets:", name, _RECIPES) for name in targets.values() if name not in _RECIPES]
    if bool(targets) != (quantization == ONLINE):
        problems.append(
            Problem(
                f"quantization={quantization!r} with targets={targets}.",
                "vLLM reads a scheme for each layer from targets, or one for all layers from its name, never both.",
                f"Give targets with quantization={ONLINE!r}, or leave them out.",
            )
        )
    if problems:
        raise PrecisionError(problems)
    if not targets:
        return _stored(quantization) | {"keep": tuple(map(regex_to_pattern, ignore))}
    rules = _in_order(targets, ignore)
    if rules is None:  # not written here
        everywhere = next((text for text in targets if text in ("*", "re:.*")), None)
        own = targets.pop(everywhere) if everywhere else next(iter(targets.values()))
        said = [(regex_to_pattern(text), _RECIPES[scheme]) for text, scheme in targets.items()]
        rest = () if everywhere else (("*", compute),)
        return _stored(own) | {"keep": tuple(map(regex_to_pattern, ignore)), "modules": (*said, *rest)}
    *said, (_, last) = rules
    named = [(regex_to_pattern(f"re:{own}"), _RECIPES.get(scheme, compute)) for own, scheme in said]
    kept, others = names_and_rules(named, compute)
    return _stored(last) | {"keep": kept, "modules": others}


def _stored(scheme: str) -> dict[str, Any]:
    block = next(block for block, name in STOCK.items() if name == scheme)
    scale = STOCK_SCALES[block]
    return {"rollout": "fp8", "rollout_block": block, "weight_scale": scale, "activation_scale": scale}


def _in_order(targets: Mapping[str, str], ignore: Sequence[str]) -> list[tuple[str, str]] | None:
    """Return (regular expression, scheme or "") in the order of the rules, if every entry excludes those before it."""
    if not all(text.startswith(f"re:{_LINEARS}") for text in targets):
        return None
    left = dict.fromkeys(ignore, "") | {text.replace(_LINEARS, "", 1): scheme for text, scheme in targets.items()}
    found, before = list[tuple[str, str]](), "re:"
    while left:
        following = [text for text in left if text.startswith(before) and not text.startswith(f"{before}(?!")]
        if len(following) != 1:
            return None
        own = following[0].removeprefix(before)
        found.append((own, left.pop(following[0])))
        before += f"(?!{own})"
    return found if found[-1][0] == ".*" else None


# ---------------------------------------------------------------------- patterns


def pattern_to_regex(pattern: str) -> str:
    """Translate a ``keep`` pattern to a regex for vLLM's ``ignore``, which takes globs only since 0.31."""
    if pattern.startswith("re:"):
        return f"re:.*(?:{pattern[3:]})"  # vLLM matches from a name's start, a contract anywhere
    pieces = {"*": ".*", "?": "."}
    return "re:" + "".join(pieces.get(c, re.escape(c)) for c in pattern) + "$"


def regex_to_pattern(text: str) -> str:
    """Translate an entry of vLLM's ``ignore`` to a ``keep`` pattern."""
    if not text.startswith("re:"):
        return text
    if text.startswith("re:.*(?:") and text.endswith(")"):
        return f"re:{text[8:-1]}"
    glob = re.sub(r"\.\*|\\(.)|\.", lambda m: m[1] or {".*": "*", ".": "?"}[m[0]], text[3:].removesuffix("$"))
    return glob if pattern_to_regex(glob) == text else f"re:^(?:{text[3:]})"
