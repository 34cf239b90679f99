"""The package speaks the field's language: an expert's search hits the right module, and no private word is left."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sedd"

# A word that people of the field search for, and the module in which the search must hit.
FIELD = {
    r"fp8": "ops/fp8.py",
    r"quantiz": "ops/fp8.py",
    r"rotary": "nn/embeddings.py",
    r"attention": "nn/attention.py",
    r"\bmlp\b": "nn/blocks.py",
    r"adaLN": "nn/conditioning.py",
    r"CUDA graph": "runtime/cuda_graphs.py",
    r"activation checkpointing": "runtime/activation_checkpointing.py",
    r"FSDP": "training/trainer.py",
    r"\bEMA\b": "training/ema.py",
    r"learning[- ]rate schedule": "training/optimizer.py",
    r"lr_schedule": "config.py",
    r"gradient clipping|clip_grad_norm": "training/optimizer.py",
    r"mixed precision": "training/trainer.py",
    r"weight initiali[sz]ation": "nn/layers.py",
    r"dataloader": "training/batches.py",
    r"classifier-free guidance": "sampling/guidance.py",
    r"temperature": "sampling/warping.py",
    r"\bELBO\b": "likelihood/bound.py",
    r"generative perplexity": "evaluation/quality/metrics.py",
    r"tau-leaping|τ-leaping": "sampling/grid.py",
    r"first-hitting": "sampling/first_hitting.py",
    r"Philox": "diffusion/rng.py",
    r"Monte Carlo": "likelihood/estimate.py",
}

# Words of the first version that an expert would have had to learn, as parts of identifiers.
PRIVATE_NAMES = frozenset(
    {
        *("told", "said", "asked", "heard", "hears", "spoken", "speaker", "voice", "whoever", "nobody", "somebody"),
        *("looked", "turned", "bent", "bend", "thought", "eighths", "pressed", "glue", "swift", "twin", "twins"),
        *("strips", "tiles", "picks", "chance", "chances", "luck", "rung", "mover", "movers", "beyond"),
        *("sharpness", "tempered", "tally", "law", "laws"),
    }
)
# The same in sentences; some of the names are ordinary English there.
PRIVATE_PROSE = PRIVATE_NAMES - {"tiles", "picks", "beyond", "turned", "chance", "pressed", "thought", "hears"}


def words(name: str) -> Iterator[str]:
    """Split an identifier into lower-case words."""
    for part in re.split(r"[_\W\d]+", name):
        yield from (word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part))


def sources(*folders: str, suffix: str = ".py") -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob(f"*{suffix}"))]
    assert found
    return [path for path in found if "egg-info" not in str(path)]


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Names that code defines or uses, with their line."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def private_identifiers(path: Path) -> list[str]:
    return [f"{path.name}:{line}: {name}" for line, name in identifiers(path) if PRIVATE_NAMES & set(words(name))]


def private_prose(path: Path, text: str) -> list[str]:
    pattern = re.compile(r"\b(" + "|".join(sorted(PRIVATE_PROSE)) + r")\b", re.IGNORECASE)
    return [
        f"{path.name}:{number}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def docstrings_and_comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


@pytest.mark.parametrize(("word", "module"), FIELD.items())
def test_a_search_for_a_word_of_the_field_hits_its_module(word: str, module: str) -> None:
    assert re.search(word, (PACKAGE / module).read_text(encoding="utf-8"), re.IGNORECASE), f"{word} not in {module}"


def test_no_private_word_is_an_identifier() -> None:
    assert [
        hit
        for path in sources("src", "tests", "examples", "benchmarks", "experiments")
        for hit in private_identifiers(path)
    ] == []


def test_no_private_word_is_in_strings_comments_or_help_texts() -> None:
    found = []
    for path in sources("src", "examples", "benchmarks", "experiments"):
        for line, text in docstrings_and_comments(path):
            found += [f"{hit} (token at line {line})" for hit in private_prose(path, text)]
    assert found == []


BLOCK = re.compile(r"^```(\w*)\n.*?^```$", re.MULTILINE | re.DOTALL)


def without_output(text: str) -> str:
    """Leave out the blocks without a language: what commands printed, stories of models among it."""
    return BLOCK.sub(lambda block: block[0] if block[1] else "", text)


def test_no_private_word_is_in_the_documentation() -> None:
    pages = [
        *sources("docs", suffix=".md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    ]
    prose = {page: without_output(page.read_text(encoding="utf-8")) for page in pages}
    assert [hit for page, text in prose.items() for hit in private_prose(page, text)] == []


def public_names() -> dict[str, list[str]]:
    """Public classes and functions at the top level of modules, and where they are defined."""
    where: dict[str, list[str]] = {}
    for path in sources("src"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                where.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    return where


def is_backend_pair(modules: list[str]) -> bool:
    """Whether all but one of the modules are Triton versions of the remaining one: the same meaning, twice."""
    reference = [module for module in modules if not module.endswith("_triton.py")]
    return len(reference) <= 1


def is_command_of(modules: list[str]) -> bool:
    """Whether a command of the command line bears the name of the one function that it runs."""
    return len([module for module in modules if not module.startswith("cli/")]) <= 1


def test_one_public_name_has_one_meaning() -> None:
    found = {
        name: modules
        for name, modules in public_names().items()
        if len(modules) > 1 and not is_backend_pair(modules) and not is_command_of(modules)
    }
    assert found == {}


def test_the_checks_catch_what_they_are_for(tmp_path: Path) -> None:
    """Mutants: a private word in a name, a comment and a page; the same name for two things."""
    module = tmp_path / "module.py"
    module.write_text("class ToldNetwork:\n    x_told = torch.told(1)  # nobody asked\n", encoding="utf-8")
    assert len(private_identifiers(module)) == 3
    (comment,) = [text for _, text in docstrings_and_comments(module)]
    assert private_prose(module, comment)
    assert private_prose(module, "Whoever reads it is told.")
    assert not private_prose(module, "Folded proteins, lawful and unsaid.")
    assert is_backend_pair(["ops/fp8.py", "ops/fp8_triton.py"])
    assert not is_backend_pair(["nn/layers.py", "ops/fp8.py"])
    assert is_command_of(["cli/train.py", "api.py"])
    assert not is_command_of(["cli/train.py", "api.py", "bench/train.py"])
