"""One fact, one home: no passage of six lines and no table is written down twice."""

import ast
import itertools
import re
from collections import defaultdict

from support import ROOT

FOLDERS = ("nemo_fp8", "nemo_fp8_hook", "tools", "benchmarks", "demo", "examples", "tests/support")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LINES, LETTERS, PAIRS = 6, 120, 4


def _files():
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def _statements(source: str) -> list[tuple[int, str]]:
    """Return (number, line) of what a file does, its texts and numbers masked, without signatures and docstrings."""
    left_out = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            left_out.update(range(node.lineno, node.body[0].lineno))
        said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if said or (isinstance(node, (ast.Import, ast.ImportFrom)) and node in tree.body):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    kept = [(number, line.split("  # ")[0].strip()) for number, line in lines if number not in left_out]
    return [
        (number, re.sub(r"\"[^\"]*\"|'[^']*'|\b\d+\b", "_", line)) for number, line in kept if line and line[0] != "#"
    ]


def _repeated(files: dict[str, str]) -> list[str]:
    """Return the places of passages of six lines that stand somewhere else, too."""
    places = defaultdict(list)
    for file, source in files.items():
        lines = _statements(source)
        for at in range(len(lines) - LINES + 1):
            passage = tuple(line for _, line in lines[at : at + LINES])
            if sum(map(len, passage)) >= LETTERS:
                places[passage].append(f"{file}:{lines[at][0]}")
    return [" = ".join(found) for found in places.values() if len(found) > 1]


def _tables(files: dict[str, str]) -> list[str]:
    """Return the values of two and more words or numbers that have a name in more than one file."""
    names = defaultdict(set)
    for file, source in files.items():
        for node in ast.parse(source).body:
            value = getattr(node, "value", None)
            if not (
                isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, (ast.Tuple, ast.Dict, ast.Set))
            ):
                continue
            words = [one for one in ast.walk(value) if isinstance(one, ast.Constant)]
            if len(words) > 1 and not any(isinstance(one, ast.Name) for one in ast.walk(value)):
                names[ast.unparse(value)].add(file)
    return [f"{value}: {', '.join(sorted(where))}" for value, where in names.items() if len(where) > 1]


def _shared(files: dict[str, str]) -> list[str]:
    """Return the files in which tables have the same names for the same words, and those names: at least PAIRS."""
    tables = [
        (
            file,
            {
                (key.value, value.value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str)
            },
        )
        for file, source in files.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Dict)
    ]
    return [
        f"{file} = {other}: {', '.join(sorted(str(name) for name, _ in rows & others))}"
        for (file, rows), (other, others) in itertools.combinations(tables, 2)
        if file != other and len(rows & others) >= PAIRS
    ]


def test_no_passage_is_written_twice():
    assert _repeated(_files()) == []


def test_no_table_is_written_twice():
    assert _tables({file: source for file, source in _files().items() if file.startswith("nemo_fp8/")}) == []


def test_no_rows_are_written_twice():
    assert _shared({file: source for file, source in _files().items() if file.startswith("nemo_fp8/")}) == []


def test_rows_that_are_written_twice_are_found():
    rows = {f"VARIABLE_{i}": str(i) for i in range(PAIRS)}
    assert _shared({"a.py": f"HERE = {rows}", "b.py": f"there({rows | {'MORE': '1'}})"}) == [
        f"a.py = b.py: {', '.join(rows)}"
    ]
    del rows["VARIABLE_0"]
    assert _shared({"a.py": f"HERE = {rows}", "b.py": f"THERE = {rows}"}) == []


def test_what_is_written_twice_is_found():
    body = "".join(f"    value_{i} = compute_something({i}, of='{i}')\n" for i in range(LINES))
    one, other = f"def one():\n{body}", f"import os\n\n\ndef other(more):\n    '''Say it.'''\n{body}"
    assert _repeated({"a.py": one, "b.py": other}) == ["a.py:2 = b.py:6"]
    assert _repeated({"a.py": one, "b.py": other.replace("value_3", "value_x")}) == []
    table = "WORDS = ('max', 'most_recent')\n"
    assert _tables({"a.py": table, "b.py": table.replace("WORDS", "_OTHER")}) == ["('max', 'most_recent'): a.py, b.py"]
    assert _tables({"a.py": table, "b.py": "WORDS = ('max',)\n"}) == []
