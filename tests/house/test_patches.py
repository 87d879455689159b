"""What is replaced of somebody else's has a row with its reason, wherever it is: names of modules and classes, and
methods of single objects.

    Patch(target, name, ours, why)      Megatron, NeMo and TE, while a context is open (``train/patching.py``)
    REPLACED, REMOVED, _tables()        torch, where the CPU stands for a GPU; _AMENDMENTS: TransformerEngine there
    COVERED                             methods of one object, whose class keeps its own: an engine's, a model's
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nemo_fp8"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
TABLES = ("REPLACED", "REMOVED", "COVERED")
OURS = ("ModuleType", "find_spec", "Parameter")
"""What makes an object of which nobody else knows."""
APPLIES = "train/patching.py: patched: "


def _trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def _inside(scope: ast.AST):
    """Yield what lies in a function or module, without the insides of functions in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, FUNCTIONS):
            yield from _inside(child)


def _scopes(node: ast.AST, around: tuple[ast.AST, ...]):
    """Yield every module and function, with the classes and functions around it."""
    if isinstance(node, (*FUNCTIONS, ast.Module)):
        yield node, around
    for child in ast.iter_child_nodes(node):
        yield from _scopes(child, (*around, node) if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else around)


def _last(node: ast.AST) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _makers(tree: ast.Module) -> set[str]:
    """Return what makes something that stands in for another: functions that return a function, and classes."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | {"partial", "staticmethod"}
    for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        inner = {node.name for node in ast.walk(function) if isinstance(node, FUNCTIONS)} - {function.name}
        given = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        if any(isinstance(v, ast.Lambda) or (isinstance(v, ast.Name) and v.id in inner) for v in given):
            found.add(function.name)
    return found


class _Scope:
    """What can be said of the values in one function: what others call, and what nobody else has."""

    def __init__(self, scope: ast.AST, around: tuple[ast.AST, ...], makers: set[str]) -> None:
        self.nodes, self.makers = list(_inside(scope)), makers
        self.assigned = [(t, n.value) for n in self.nodes if isinstance(n, ast.Assign) for t in n.targets]
        self.local = {t.id: value for t, value in self.assigned if isinstance(t, ast.Name)}
        self.functions = {node.name for node in self.nodes if isinstance(node, FUNCTIONS)}
        self.functions |= {n.name for outer in around for n in _inside(outer) if isinstance(n, FUNCTIONS)}
        targets = [node.target for node in self.nodes if isinstance(node, ast.For)]
        self.looped = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        owner = around[-1] if around and isinstance(around[-1], ast.ClassDef) else None
        self.calls_itself = owner is not None and "__call__" in {getattr(n, "name", "") for n in owner.body}
        self.name = " ".join(getattr(node, "name", "") for node in (*around, scope)).strip()

    def stands_in(self, value: ast.AST) -> bool:
        """Return whether a value may be called in the place of another."""
        if isinstance(value, ast.Name):
            held = self.local.get(value.id)
            itself = value.id == "self" and self.calls_itself
            return itself or value.id in self.functions or (held is not None and self.stands_in(held))
        if isinstance(value, ast.Call):
            return _last(value.func) in self.makers
        return isinstance(value, ast.Lambda)

    def is_theirs(self, owner: ast.AST) -> bool:
        """Return whether an object is another's: not ``self``, not a function, not what was made here."""
        root = ast.unparse(owner).partition(".")[0]
        made = [n for n in ast.walk(self.local.get(root, ast.Pass())) if isinstance(n, ast.Call)]
        own = root in self.functions or any(_last(call.func) in OURS for call in made)
        return not own and ast.unparse(owner) not in ("self", "cls")


def _replaced(tree: ast.Module) -> list[tuple[str, str]]:
    """Return (functions around it, name) of what is replaced; ``*`` is a name that a variable holds."""
    found, makers = [], _makers(tree)
    for node, around in _scopes(tree, ()):
        scope = _Scope(node, around, makers)
        for target, value in scope.assigned:
            named = isinstance(target, ast.Attribute) and not target.attr.startswith("__")
            if named and scope.is_theirs(target.value) and scope.stands_in(value):
                found.append((scope.name, target.attr))
        for call in (node for node in scope.nodes if isinstance(node, ast.Call)):
            asked = ast.unparse(call.func)
            if asked in ("setattr", "delattr") and scope.is_theirs(call.args[0]):
                unknown = [v for v in call.args[2:] if not (isinstance(v, ast.Name) and v.id in scope.looped)]
                if all(isinstance(v, ast.Attribute) or scope.stands_in(v) for v in unknown):
                    found.append((scope.name, "*"))
            elif asked.startswith("vars(") and asked.endswith((").update", ").setdefault")):
                names = [keyword.arg for keyword in call.keywords]
                names += [n.value for n in call.args[:1] if isinstance(n, ast.Constant)]
                theirs = scope.is_theirs(call.func.value.args[0])
                found += [(scope.name, name) for name in names or ["*"] if theirs]
    return found


def _rows(tree: ast.Module) -> dict[str, str]:
    """Return a file's rows: names that are replaced, or functions that replace some; and the reason of each."""
    words: dict[str, str] = {}
    rows: dict[str, str] = {}
    for node in tree.body:
        target = next(iter(getattr(node, "targets", ())), getattr(node, "target", None))
        table = ast.unparse(target) if target is not None else ""
        if isinstance(getattr(node, "value", None), ast.Constant):
            words[table] = str(node.value.value)
        if table in TABLES:
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                rows[key.value if isinstance(key, ast.Constant) else "*"] = _reason(value, words)
        elif table == "_AMENDMENTS":
            for value in node.value.values:
                does = [n for n in ast.walk(value) if isinstance(n, (ast.Name, ast.Attribute))]
                rows |= {ast.unparse(n): _reason(value, words) for n in does if ast.unparse(n) not in words}
    return rows


def _reason(value: ast.AST, words: dict[str, str]) -> str:
    said = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    said += [words[n.id] for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in words]
    return max(said, key=len, default="")


def _without_a_row(trees: dict[str, ast.Module]) -> list[str]:
    """Return ``file: functions: name`` of what is replaced and stands in no table."""
    found = []
    elsewhere = {name for tree in trees.values() for name in _rows(tree) if "." in name}  # module.function
    for file, tree in trees.items():
        rows = _rows(tree).keys()
        for functions, name in _replaced(tree):
            names = {*functions.split(), *(f"{Path(file).stem}.{one}" for one in functions.split())}
            if not (name in rows or names & (rows | elsewhere) or (name == "*" and rows)):
                found.append(f"{file}: {functions}: {name}")
    return found


def _patches(trees: dict[str, ast.Module]) -> list[tuple[str, ast.Call]]:
    """Return every ``Patch(...)`` of the package with its file."""
    return [
        (file, node)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Patch"
    ]


def test_what_is_replaced_has_a_row():
    """``patched`` itself goes by the rows that it is given."""
    found = _without_a_row(_trees())
    assert {one for one in found if not one.startswith(APPLIES)} == set()
    assert found, f"{APPLIES} is not there any more"


def test_every_row_has_its_reason():
    trees = _trees()
    rows = {(file, name): reason for file, tree in trees.items() for name, reason in _rows(tree).items()}
    rows |= {(file, call.args[1].value): call.args[3].value for file, call in _patches(trees)}
    assert len(rows) > 30
    assert [where for where, reason in rows.items() if len(reason.split()) < 4] == []


def test_names_of_torch_have_their_reasons():
    pytest.importorskip("torch")
    from nemo_fp8.te_cpu import device

    reasons = {(owner, name): why for owner, table in device._tables() for name, (_, why) in table.items()}
    assert len(reasons) > 50
    assert [where for where, why in reasons.items() if not why.strip()] == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(engine):\n    engine.step = lambda: None",
        "def f(model):\n    def train(): pass\n    model.train = train",
        "def make(theirs):\n    def ours(): pass\n    return ours\ndef f(dist):\n    dist.barrier = make(dist.barrier)",
        "def f(layer):\n    layer.impl.write = functools.partial(print, 1)",
        "class Refusal: pass\ndef f(core):\n    core.get_output = Refusal()",
        "class Own:\n    def __init__(self, core):\n        core.get = self\n    def __call__(self): pass",
        "def f(core):\n    vars(core).setdefault('send', print)",
        "def f(core):\n    vars(core).update(send=print)",
        "def f(torch, table):\n    for name, ours in table.items():\n        setattr(torch, name, ours)",
        "def f(torch):\n    delattr(torch, 'MemPool')",
    ],
)
def test_what_is_replaced_without_a_row_is_found(source):
    assert len(_without_a_row({"a.py": ast.parse(source)})) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class Own:\n    def __init__(self):\n        self.step = lambda: None",
        "def f(engine):\n    engine.size = 3",
        "def f():\n    def ours(): pass\n    ours.why = lambda: 1",
        "def f():\n    module = types.ModuleType('a')\n    module.div = lambda: 1",
        "COVERED = {'step': 'there is no switch for it'}\ndef f(engine):\n    engine.step = lambda: None",
    ],
)
def test_what_is_ours_or_has_a_row_is_not(source):
    assert _without_a_row({"a.py": ast.parse(source)}) == []
