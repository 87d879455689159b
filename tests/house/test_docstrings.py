"""Whatever is public has a docstring: classes, functions and methods. That of a function begins with a verb, and says
what the function raises.

A method that a base class states needs none: one of this package with a docstring there, or one from outside, whose
documents are not ours. Nor does a method of a Protocol of this package, in a class that has all of its methods.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_fp8"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STATE_NOTHING = {"object", "Protocol", "Generic", "NamedTuple", "Enum", "StrEnum", "IntEnum", "ABC", "Exception"}

# How a function's docstring begins: it says what the function does. What is read like a value may be a noun.
VERBS = set(
    "add adopt allocate answer append apply ask assemble attach begin bring broadcast build call cast check close "
    "combine compare compile compute confirm construct continue convert copy count create decode decorate delete "
    "describe divide do download draw drop emulate end enter estimate examine fill find fingerprint free gather "
    "generate give group hash have hold import install join keep leave let list listen load lock log make map measure "
    "move multiply name note open pack pad parse pass plan post prepare print profile prove push put quantize "
    "raise read reap record refuse register remember remove render repair replace report restore return roll "
    "rotate round run say scale see select send serve set shift show skip sort split stack stand start stop store "
    "sum switch swizzle take tell time train translate turn undo unmap unpack use validate view wait warn watch "
    "without work wrap write yield".split()
)
VALUES = ("property", "cached_property", "overload")
BIRTH = ("__init__", "__post_init__", "__call__")


def _without(trees: dict[str, ast.Module]) -> list[str]:
    """Return ``file: name`` of everything public without a docstring."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        classes.setdefault(node.name, []).append(node)
    protocols = [node for named in classes.values() for node in named if "Protocol" in _bases(node)]
    missing = []
    for file, tree in trees.items():
        for owner, node in _public(tree, ()):
            setter = any(ast.unparse(d).endswith((".setter", "overload")) for d in node.decorator_list)
            method = bool(owner) and isinstance(node, FUNCTIONS)
            stated = method and _is_stated(node.name, owner[-1], classes, protocols)
            if not (ast.get_docstring(node) or setter or stated):
                missing.append(f"{file}: {'.'.join([*(of.name for of in owner), node.name])}")
    return missing


def _public(node: ast.AST, owner: tuple[ast.ClassDef, ...]):
    """Yield the public classes and functions in a module or class, with the classes around them."""
    for child in node.body:
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)) and not child.name.startswith("_"):
            yield owner, child
            if isinstance(child, ast.ClassDef):
                yield from _public(child, (*owner, child))
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _public(child, owner)


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0] for base in node.bases]


def _methods(node: ast.ClassDef) -> dict[str, ast.AST]:
    return {child.name: child for child in node.body if isinstance(child, FUNCTIONS)}


def _documents(node: ast.ClassDef, name: str) -> bool:
    return name in (methods := _methods(node)) and bool(ast.get_docstring(methods[name]))


def _implements(node: ast.ClassDef, protocol: ast.ClassDef) -> bool:
    """Whether a class has all methods of a Protocol, whose properties may be attributes there."""
    wanted = {
        name for name, method in _methods(protocol).items() if "property" not in map(ast.unparse, method.decorator_list)
    }
    return wanted <= _methods(node).keys()


def _is_stated(name: str, owner: ast.ClassDef, classes, protocols) -> bool:
    if any(_documents(protocol, name) and _implements(owner, protocol) for protocol in protocols):
        return True
    for base in _bases(owner):
        if base not in classes and base not in STATE_NOTHING:
            return True
        for other in classes.get(base, []):
            if _documents(other, name) or _is_stated(name, other, classes, []):
                return True
    return False


def test_everything_public_has_a_docstring():
    files = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert _without(files) == []


def test_what_has_none_is_found():
    lines = (
        "from typing import Protocol",
        "import torch",
        "class Says(Protocol):",
        "    '''What is needed.'''",
        "    def one(self): '''Return one.'''",
        "    def two(self): '''Return two.'''",
        "class Whole:",
        "    '''Has all that is needed.'''",
        "    def one(self): return 1",
        "    def two(self): return 2",
        "    def three(self): return 3",
        "class Half:",
        "    '''Has a part.'''",
        "    def one(self): return 1",
        "class More(Whole):",
        "    '''Has it from a class without docstrings.'''",
        "    def three(self): return 4",
        "class Theirs(torch.nn.Module):",
        "    def forward(self): return 1",
        "class _Hidden:",
        "    def one(self): return 1",
        "def free(): return 1",
        "def _private(): return 1",
    )
    found = _without({"a.py": ast.parse("\n".join(lines))})
    assert found == ["a.py: Whole.three", "a.py: Half.one", "a.py: More.three", "a.py: Theirs", "a.py: free"]


def _without_a_verb(trees: dict[str, ast.Module]) -> list[str]:
    """Return ``file: name: first word`` of every function whose docstring does not begin with a verb."""
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and (said := ast.get_docstring(node)):
                value = any(ast.unparse(d).endswith(VALUES) for d in node.decorator_list)
                if not value and said.split()[0].strip(",.:").lower() not in VERBS:
                    found.append(f"{file}: {node.name}: {said.split()[0]}")
    return found


def test_the_docstring_of_a_function_begins_with_a_verb():
    """Private functions, tools and benchmarks, too."""
    folders = ("nemo_fp8", "nemo_fp8_hook", "benchmarks", "tools", "demo", "examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert _without_a_verb({str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}) == []


def test_a_docstring_without_a_verb_is_found():
    lines = (
        "def noun(): 'The codes.'",
        "def question(): 'Whether it is so.'",
        "def formula(): '``a + b``.'",
        "def verb(): 'Return the codes.'",
        "class Some:",
        "    @functools.cached_property",
        "    def value(self): 'The codes.'",
        "    def _hidden(self): 'Of all of them.'",
    )
    found = _without_a_verb({"a.py": ast.parse("\n".join(lines))})
    assert found == ["a.py: noun: The", "a.py: question: Whether", "a.py: formula: ``a", "a.py: _hidden: Of"]


def _silent(trees: dict[str, ast.Module]) -> list[str]:
    """Return ``file: name`` of every public function that raises an error of which its docstring says nothing.

    An ``__init__`` and a ``__post_init__`` speak in the docstring of their class. A method that is there to be written
    by subclasses raises NotImplementedError alone.
    """
    found = []
    for file, tree in trees.items():
        for owner, node in _callable(tree, ()):
            said = ast.get_docstring(node) or ""
            if node.name.startswith("__") and owner:
                said += ast.get_docstring(owner[-1]) or ""
            elif not said:
                continue
            errors = [_raised(statement) for statement in _own_statements(node)]
            if any(errors) and not any(error and error in said for error in (*errors, "aise")):
                found.append(f"{file}: {'.'.join([*(of.name for of in owner), node.name])}")
    return found


def _callable(node: ast.AST, owner: tuple[ast.ClassDef, ...]):
    """Yield the functions that a caller reaches by public names, those that make an object among them."""
    for child in node.body:
        if isinstance(child, FUNCTIONS) and (child.name in BIRTH or not child.name.startswith("_")):
            yield owner, child
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _callable(child, (*owner, child))
        elif isinstance(child, (ast.If, ast.Try)):
            yield from _callable(child, owner)


def _own_statements(node: ast.AST):
    """Yield what lies in a function, without what lies in functions and classes inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _own_statements(child)


def _raised(node: ast.AST) -> str | None:
    """Return the name of the error that a statement raises; None for another, and for one that passes an error on."""
    error = node.exc if isinstance(node, ast.Raise) else None
    name = ast.unparse(error.func if isinstance(error, ast.Call) else error) if error else None
    return None if name == "NotImplementedError" and not isinstance(error, ast.Call) else name


def test_a_function_says_what_it_raises():
    """Commands are left out: their docstrings are help, which speaks of exit codes."""
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != "cli"]
    assert _silent({str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in files}) == []


def test_an_error_that_is_not_said_is_found():
    lines = (
        "def silent(): 'Return it.'; raise ValueError(1)",
        "def says(): 'Return it; raises ValueError.'; raise ValueError(1)",
        "def turns(): 'Turn it into a ValueError.'; raise ValueError(1)",
        "def inside():",
        "    'Return a function.'",
        "    def other(): raise ValueError(1)",
        "def again():",
        "    'Pass an error on.'",
        "    try: silent()",
        "    except ValueError: raise",
        "def _hidden(): 'Return it.'; raise ValueError(1)",
        "class Some:",
        "    'One.'",
        "    def __init__(self): raise ValueError(1)",
        "    def abstract(self): 'Return it.'; raise NotImplementedError",
        "class Told:",
        "    'One. Raises ValueError.'",
        "    def __post_init__(self): raise ValueError(1)",
    )
    assert _silent({"a.py": ast.parse("\n".join(lines))}) == ["a.py: silent", "a.py: Some.__init__"]
