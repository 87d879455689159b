"""One shape for a finding, one scale, one table of words: no second one anywhere in the package."""

import ast
import importlib
import re
import string
from pathlib import Path

import pytest

from nemo_fp8 import findings
from nemo_fp8.errors import SEVERITIES, PrecisionError, Problem, unknown
from nemo_fp8.findings import RULES, finding, gaps
from nemo_fp8.preflight import agreement

PACKAGE = Path(__file__).parents[2] / "nemo_fp8"
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
SENTENCES = {"what", "why", "remedy"}


def _shapes(tree):
    """Classes whose fields make a finding: the three sentences, or how grave it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = {
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
            if fields >= SENTENCES or "severity" in fields:
                yield node.name


def test_there_is_no_second_shape():
    assert {(str(path), name) for path, tree in TREES.items() for name in _shapes(tree)} == {("errors.py", "Problem")}


def test_a_second_shape_would_be_seen():
    one = "@dataclass\nclass A:\n    what: str\n    why: str\n    cost: float\n    remedy: str\n"
    other = "class B(NamedTuple):\n    severity: str\n    text: str\n"
    assert [*_shapes(ast.parse(one + other))] == ["A", "B"]
    assert [*_shapes(ast.parse(one.replace("remedy", "cure")))] == []


def test_every_severity_is_of_the_scale():
    assert {rule.severity for rule in RULES.values()} == set(SEVERITIES)
    with pytest.raises(PrecisionError, match="Did you mean 'warning'"):
        Problem("a", "b", "c", "warnings")
    said = {
        keyword.value
        for tree in TREES.values()
        for call in _calls(tree)
        for keyword in call.keywords
        if keyword.arg == "severity"
    }
    literal = {
        node.value
        for value in said
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert literal <= set(SEVERITIES)


def _calls(tree):
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _strings(tree):
    """Every string in the code, as a pattern: what an f-string fills in may be anything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.escape(node.value)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            yield "".join(
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in node.values
            )


def test_every_rule_is_raised_by_somebody():
    said = {text for path, tree in TREES.items() if path != Path("findings.py") for text in _strings(tree)}
    exact, patterns = (
        {text for text in said if ".+" not in text},
        [text for text in said if ".+" in text and "-" in text],
    )
    nobody = [
        code
        for code in RULES
        if re.escape(code) not in exact and not any(re.fullmatch(pattern, code) for pattern in patterns)
    ]
    assert nobody == []


def test_every_code_that_is_raised_is_a_rule():
    codes = {
        call.args[0].value
        for tree in TREES.values()
        for call in _calls(tree)
        if isinstance(call.func, ast.Name)
        and call.func.id == "finding"
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(codes) > 50
    assert codes <= set(RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_rule_is_three_sentences_whose_gaps_are_words(code):
    rule = RULES[code]
    assert (rule.code, rule.where) == ("", ""), "finding() says them"
    for text in (rule.what, rule.why, rule.remedy):
        assert text
        assert all(name is None or name.isidentifier() for _, name, _, _ in string.Formatter().parse(text))


def test_a_finding_is_its_rule_with_the_gaps_filled_in():
    assert gaps("gqa-replicated") == {"kv", "tp"}
    found = finding("gqa-replicated", "rollout_tensor", kv=2, tp=8)
    assert found == Problem(
        "2 key-value heads over a rollout-tp of 8: ranks hold copies.",
        "vLLM repeats key-value heads where there are fewer than ranks.",
        "Nothing to do; a smaller rollout-tp saves the copies.",
        "info",
        "gqa-replicated",
        "rollout_tensor",
    )
    assert finding("gqa-replicated", kv=2, tp=8, severity="warning").severity == "warning"
    assert found.to_dict() == vars(found)
    assert unknown("name", "a", ["b"]).severity == "error"


MOVED = [
    (findings, "Finding"),
    (findings, "Rule"),
    (agreement, "Difference"),
    ("nemo_fp8.mismatch", "Difference"),
    ("nemo_fp8.mismatch.weights", "Difference"),
]


@pytest.mark.parametrize(("module", "name"), MOVED, ids=str)
def test_old_names_say_where_the_shape_is(module, name):
    module = importlib.import_module(module) if isinstance(module, str) else module
    with pytest.warns(DeprecationWarning, match=r"is nemo_fp8\.errors\.Problem now"):
        assert getattr(module, name) is Problem
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        module.Nothing  # noqa: B018
