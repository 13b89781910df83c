"""Below ``runtime`` the core speaks of rows and tensors, never of the field it serves."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.architecture import _sources
from tests.architecture._sources import Source

LAYERS = ["errors", "environment", "plugins", "comm", "tensor", "partition", "graph", "spec", "adapters"]
BANNED = re.compile(r"atoms?|molecul\w*|chem\w*|forces?|stress(es)?|virials?|angstroms?")
ALLOWED = {"ParticleHaloConfig"}
_PARTS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SPOKEN = {tokenize.NAME, tokenize.COMMENT, tokenize.STRING}


def banned_words(source: Source) -> Iterator[str]:
    """Find banned words in identifiers, comments and strings, whatever the case and the joining."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in _SPOKEN:
            continue
        for word in _WORD.findall(token.string):
            if word in ALLOWED:
                continue
            for part in _PARTS.findall(word):
                if BANNED.fullmatch(part.lower()):
                    yield f"{source.name}:{token.start[0]}: {part!r} in {word!r}"


@pytest.mark.parametrize("name", LAYERS)
def test_low_layers_do_not_speak_of_the_field(name: str) -> None:
    found = [finding for source in _sources.layer(name) for finding in banned_words(source)]
    assert not found, "\n".join(["words that belong to runtime and above:", *found])


@pytest.mark.parametrize(
    "text",
    [
        "n_atoms = 1",
        "class ForceStrategy: ...",
        "def perAtomEnergy(): ...",
        "# the virial of a row",
        's = "stress"',
        's = f"{x} molecules"',
        "MOLECULE = 1",
        '"""Chemistry."""',
        "x.forces",
        "unit = 'Angstrom'",
        "LJForces2 = 1",
    ],
)
def test_rule_finds(text: str) -> None:
    assert len(list(banned_words(_sources.sample(text + "\n")))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "atomic_add = 1",
        "# enforce a schema, reinforced by atomicity",
        "class ParticleHaloConfig: ...",
        "s = 'distressed forceful'",
    ],
)
def test_rule_lets_pass(text: str) -> None:
    assert not list(banned_words(_sources.sample(text + "\n")))
