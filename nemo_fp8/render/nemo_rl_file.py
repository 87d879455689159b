"""Read a NeMo RL configuration as NeMo RL reads it: by OmegaConf, with the files that it extends.

    defaults: base.yaml            a file, or a list of them: read first, from the folder of the file that names them
    _override_: true               this section takes the place of the extended file's, and is not merged with it
    ${policy.precision}            resolved when the value is read, so a line that is never read may refer to anything
    ???                            for the command line to give; read as a key that is missing

A text that is no file is an overlay. The file that it extends is unknown, so ``defaults:`` is not followed, and keys
that it leaves out have NeMo RL's defaults.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import omegaconf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.version import Version

from nemo_fp8.contract.yaml import UNREADABLE
from nemo_fp8.errors import PrecisionError
from nemo_fp8.render.nemo_rl_keys import FILES, of_another_kind

# The functions that NeMo RL gives to OmegaConf.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
Source = str | Path | Mapping[str, Any]
_BASE_PRECISION = "bfloat16"  # what NeMo RL's base files set


def read_document(source: Source) -> Mapping[str, Any]:
    """Return a configuration whose values are resolved one by one as they are read.

    ``source`` is a file (a Path), a text, or a mapping, such as a configuration that was read already.

    Raises PrecisionError if it is no YAML mapping, or a file that it extends is missing, damaged or extends itself.
    """
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            _register(name, function)
    document: Mapping[str, Any]
    with resolving():
        if isinstance(source, Path):
            document = _extended(source, ())
        else:
            document = _parsed(source, "the text") if isinstance(source, str) else OmegaConf.create(source)
        policy = document.get("policy")
    if isinstance(source, Path) and policy is None:
        raise PrecisionError(
            f"{source} has no section policy.",
            "NeMo RL keeps the precision of training and rollout there; this is another kind of file.",
            "Give the file that NeMo RL is started with.",
        )
    if isinstance(policy, DictConfig) and "precision" not in policy:
        policy.precision = _BASE_PRECISION
    return document


def _register(name: str, function: Callable[..., Any]) -> None:
    """Give OmegaConf a function of NeMo RL's. 2.4 renamed the call, whose new name is that of another before."""
    if Version(omegaconf.__version__) >= Version("2.4"):
        OmegaConf.register_resolver(name, function, annotation_validation="off")
    else:
        OmegaConf.register_new_resolver(name, function)


@contextmanager
def resolving() -> Iterator[None]:
    """Turn what OmegaConf says of a value that cannot be resolved into a PrecisionError."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise PrecisionError(
            f"{error.full_key or 'A value of the configuration'} cannot be resolved.",
            f"OmegaConf says: {str(error).splitlines()[0]}.",
            "Give the file itself, beside the files that it extends, or write the value.",
        ) from error


def _extended(path: Path, extending: tuple[Path, ...]) -> DictConfig:
    """Return a file merged over the files that it extends; ``extending`` are those that led here.

    As in NeMo RL, what a link extends lies beside the link, not beside the file that it leads to.
    """
    path = path.parent.resolve() / path.name  # one name for a folder, so that a circle is seen
    if path in extending:
        raise PrecisionError(
            f"{path.name} extends itself.",
            f"The way is {' -> '.join(one.name for one in (*extending, path))}.",
            "Take one of these names out of its file's defaults:.",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = f"defaults: in {extending[-1]} names it. " if extending else ""
        raise PrecisionError(
            f"{path} cannot be read.", f"{why}{error}.", "Correct the name, or copy the file there."
        ) from error
    document = _parsed(text, str(path))
    defaults = document.pop("defaults", None)
    wrong = [*of_another_kind(f"defaults in {path}", defaults, FILES)]
    if wrong:
        raise PrecisionError(wrong)
    merged = OmegaConf.create({})
    for default in [defaults] if isinstance(defaults, str) else defaults or ():
        merged = _merged(merged, _extended(path.parent / default, (*extending, path)))
    return _merged(merged, document)


def _merged(below: DictConfig, above: DictConfig) -> DictConfig:
    for key in [*above]:
        known = not OmegaConf.is_missing(above, key) and not OmegaConf.is_interpolation(above, key)
        section = above[key] if known else None
        if isinstance(section, DictConfig) and section.get("_override_", False):
            section.pop("_override_")
            below.pop(key, None)
    merged = OmegaConf.merge(below, above)
    assert isinstance(merged, DictConfig)
    return merged


def _parsed(text: str, name: str) -> DictConfig:
    try:
        document = OmegaConf.create(text)
    except (*UNREADABLE, OmegaConfBaseException) as error:
        raise PrecisionError(
            f"{name} is not YAML that OmegaConf reads.", f"{' '.join(str(error).split())}.", "Correct the YAML."
        ) from error
    if not isinstance(document, DictConfig):
        raise PrecisionError(
            f"{name} is no mapping.", "A NeMo RL configuration is sections of settings.", "Write 'key: value' lines."
        )
    return document
