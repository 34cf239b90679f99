"""Write what pages state about the program: command line, configuration, HTTP interface, limits, packages and layers.

python experiments/reference_pages.py              writes docs/reference/{cli,configuration,http}.md and parts of pages
python experiments/reference_pages.py --check      names the pages that are stale, and then ends with code 1

Parts of pages stand between two comments, such as ``<!-- limits -->`` and ``<!-- end of limits -->``.

What the pages state is read from the program: options from the Typer application, keys and their meanings from
`sedd.training.config`, allowed values from the errors that wrong ones cause, requests from the OpenAPI document.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import reference_text as page_text
import tree
import typer

from sedd import files, registry, sampling_settings, yaml_file
from sedd.cli import app
from sedd.cli.root import LIMITS
from sedd.data import tables
from sedd.schema import MAX_COUNT
from sedd.tokenizer import bpe
from sedd.training import config
from sedd.training.config import OBJECTIVES, SCHEDULES, RunConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/reference"
NOTE = "<!-- written by experiments/reference_pages.py: change the code that it describes, and run it again -->"
TYPES = {str: "text", int: "integer", float: "number", Path: "path", bool: "`true` or `false`"}


def cell(text: str) -> str:
    """Return a text as a cell of a table: one line, no bar that ends the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def prose(text: str) -> str:
    """Return a paragraph in lines of at most 130 characters; code is not broken."""
    joined = re.sub(r"`[^`]+`", lambda span: span[0].replace(" ", "\0"), " ".join(text.split()))
    return textwrap.fill(joined, 130, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def code(value: object) -> str:
    """Return a value as code, a text as it is, others as in JSON."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


# Command line ----------------------------------------------------------------------------------------------


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with the words that name it, in the order of the help."""
    yield words, command
    listed = command.list_commands(None) if words == () else list(getattr(command, "commands", {}))
    for name in listed:
        yield from commands(command.commands[name], (*words, name))


def is_argument(parameter: Any) -> bool:
    """Return whether a parameter of a command is an argument, not an option."""
    return not parameter.opts[0].startswith("-")


def value_type(parameter: Any) -> str:
    """Return the type of the value of a parameter; a flag has none."""
    annotation = parameter.type_descriptor.annotation
    if getattr(parameter, "is_flag", False):
        return "flag"
    (kind,) = typing.get_args(annotation) or (annotation,)
    limits = f", {parameter.min} to {parameter.max}" if parameter.max is not None else ""
    several = ", repeatable" if parameter.multiple else ", any number" if parameter.nargs == -1 else ""
    return TYPES[kind] + limits + several


def argument_name(parameter: Any) -> str:
    """Return the name of an argument as the usage line shows it."""
    return str(parameter.metavar or parameter.name).strip("[]").upper().replace("_", "-")


def usage(words: tuple[str, ...], command: Any) -> str:
    """Return the usage line: optional arguments in brackets."""
    pieces = ["sedd", *words, "[OPTIONS]"]
    for parameter in filter(is_argument, command.params):
        name = argument_name(parameter) + ("..." if parameter.nargs == -1 else "")
        pieces.append(name if parameter.required else f"[{name}]")
    return " ".join([*pieces, *(["COMMAND"] if hasattr(command, "commands") else [])])


def default_of(parameter: Any) -> str:
    """Return the default of a parameter, which may be none."""
    if parameter.required:
        return "required"
    unset = parameter.default is None or parameter.default is False
    return "" if unset else code(str(parameter.default))


def parameter_rows(command: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and meaning of the arguments and options of a command."""
    for parameter in sorted(command.params, key=lambda parameter: not is_argument(parameter)):
        if getattr(parameter, "hidden", False):
            continue
        names = [argument_name(parameter)] if is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
        yield ", ".join(map(code, names)), value_type(parameter), default_of(parameter), with_code(parameter.help or "")


def with_code(text: str) -> str:
    """Return a help text of paragraphs and lists as Markdown, options as code."""
    spans = re.split(r"(``?[^`]+``?)", inspect.cleandoc(text))
    return "".join(part if "`" in part else re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", part) for part in spans)


def cli_page() -> str:
    """Return the page of the command line."""
    root = typer.main.get_command(app)
    listed = list(commands(root))
    groups = [(words, command) for words, command in listed if len(words) == 1]
    summary = table(
        ("command", "what it does"),
        ([f"[`sedd {words[0]}`](#sedd-{words[0]})", first_line(command.help)] for words, command in groups),
    )
    parts = [
        "# Command line: every command and option of `sedd`",
        NOTE,
        prose(page_text.CLI),
        "```console\n$ sedd train --help\n```",
        summary,
    ]
    for words, command in listed:
        name = " ".join(("sedd", *words))
        parts += [f"{'#' * min(2 + max(len(words) - 1, 0), 3)} {name}"] if words else ["## sedd"]
        parts += [f"```\n{usage(words, command)}\n```", with_code(command.help or "")]
        if rows := list(parameter_rows(command)):
            parts.append(table(("argument or option", "type", "default", "meaning"), rows))
        if words and hasattr(command, "commands"):
            below = [f"[`{name} {each}`](#sedd-{words[0]}-{each})" for each in command.commands]
            parts.append(f"Commands: {', '.join(below)}.")
        parts += [with_code(command.epilog)] if command.epilog else []
    parts.append(prose(page_text.CLI_END))
    return "\n\n".join(part for part in parts if part) + "\n"


def first_line(text: str | None) -> str:
    """Return the first paragraph of a help text."""
    return inspect.cleandoc(text or "").split("\n\n")[0]


# Configuration ---------------------------------------------------------------------------------------------


def field_docs(owner: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, those of its base classes included."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, after in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                doc = after.value if isinstance(after, ast.Expr) else None
                if isinstance(doc, ast.Constant):
                    found[field.target.id] = str(doc.value)
    return found


def type_name(kind: Any) -> str:
    """Return the name of the type of a key."""
    if isinstance(kind, types.UnionType):
        return " or ".join("`null`" if part is type(None) else type_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return "list of texts"
    return "mapping" if typing.get_origin(kind) is dict else TYPES[kind]


def allowed(build: Callable[[Any], object], kind: Any) -> str:
    """Return the type of a value and which are allowed, from the errors that wrong values cause.

    Args:
        build: Called with a value; raises a ValueError in a sentence if it is not allowed.
        kind: The type of the value.
    """
    text, parts = type_name(kind), []
    probes = ["?"] if "text" in text else [-1, 2, 10**40] if "integer" in text or "number" in text else []
    for value in probes:
        try:
            build(float(value) if "number" in text else value)
        except ValueError as error:
            sentence = str(error).split("; ", 1)[-1]
            if names := re.search(r"choose one of (.+)$", sentence):
                choices = [name for name in names[1].split(", ") if name not in config.NOT_FOR_TRAINING]
                return ", ".join(map(code, choices)) + (" or `null`" if "null" in text else "")
            rule = re.search(
                r"(?:must|number of) (?:lie in |lie |be |satisfy )?(.+?)(?:(?::|, or| correction) .+| step)?$", sentence
            )
            parts += [rule[1]] if rule else []  # else it contradicts another key, which its meaning states
    limits = " and ".join(dict.fromkeys(parts))
    return ", ".join([text, *([re.sub(r"^(\S+) or more and (\S+) or less$", r"\1 to \2", limits)] if limits else [])])


def key_rows(section: str, owner: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield path, allowed values, default and meaning of every key of a section; an empty one is the run itself."""
    docs, hints = field_docs(owner), typing.get_type_hints(owner)
    for field in dataclasses.fields(owner):
        if dataclasses.is_dataclass(hints[field.name]):
            continue

        def build(value: Any, name: str = field.name) -> object:
            made = owner(**{name: value})
            return made.check_trainable() if isinstance(made, RunConfig) else made

        path = f"{section}.{field.name}" if section else field.name
        default = getattr(owner(), field.name)
        yield code(path), allowed(build, hints[field.name]), code(default), with_code(docs[field.name])


def option_rows(
    names: registry.Registry, path: str, hidden: Iterable[str], given: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    """Yield path, owners, allowed values, default and meaning of the options of registered classes."""
    owners: dict[tuple[str, ...], list[str]] = {}
    for name in names.built_in:
        owner = names.load(name)
        docs, hints = field_docs(owner), typing.get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if field.default is dataclasses.MISSING or hints[field.name] not in TYPES or name in hidden:
                continue

            def build(value: Any, owner: Any = owner, name: str = field.name) -> object:
                wanted = {k: v for k, v in given.items() if k in inspect.signature(owner).parameters}
                return owner(**wanted, **{name: value})

            row = allowed(build, hints[field.name]), code(field.default), docs[field.name]
            owners.setdefault((code(path.format(field.name)), *row), []).append(code(name))
    for (key, *rest), named in owners.items():
        yield key, ", ".join(named), *rest


def configuration_page() -> str:
    """Return the page of the configuration keys."""
    from sedd import process, schedule

    head, options_head = (
        ("key", "type, allowed values", "default", "meaning"),
        ("type, allowed values", "default", "meaning"),
    )
    noise, times = process.Absorbing(2), schedule.LogLinear()
    given = {"process": noise, "schedule": times, "vocab_size": 2}
    objectives = option_rows(OBJECTIVES, "objective_options.{}", config.NOT_FOR_TRAINING, given)
    parts = [
        "# Configuration keys: every path of `--set`",
        NOTE,
        prose(page_text.KEYS),
        f"```sh\n{page_text.EXAMPLE}\n```",
        prose(page_text.DEFAULTS),
    ]
    hints = typing.get_type_hints(RunConfig)
    for section in (field.name for field in dataclasses.fields(RunConfig)):
        if dataclasses.is_dataclass(owner := hints[section]):
            assert isinstance(owner, type)
            title, line = page_text.SECTIONS[section]
            parts += [f"## {title}: `{section}`", line, table(head, key_rows(section, owner))]
        if section == "noise":
            rows = option_rows(SCHEDULES, "noise.options.{}", (), {})
            parts += ["Options of each schedule:", table(("key", "schedule", *options_head), rows)]
    parts += [
        "## The run",
        "What each objective learns: [Objectives](../concepts/objectives.md).",
        table(head, key_rows("", RunConfig)),
        "Options of each objective that has some:",
        table(("key", "objective", *options_head), objectives),
        "## Options of samplers: `--option`",
        prose(page_text.SAMPLER_OPTIONS),
        table(("option", "sampler", *options_head), sampler_rows()),
    ]
    return "\n\n".join(parts) + "\n"


def sampler_rows() -> Iterator[tuple[str, ...]]:
    """Yield option, sampler, allowed values, default and meaning."""
    from sedd import process, schedule

    for noise in (process.Absorbing(2), process.Uniform(2)):
        given = {"model": None, "process": noise, "schedule": schedule.LogLinear()}
        other = [name for name in sampling_settings.SAMPLERS.built_in if (name == "gibbs") == noise.only_masks]
        yield from option_rows(sampling_settings.SAMPLERS, "{}", other, given)


# HTTP ------------------------------------------------------------------------------------------------------


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the server."""
    from fastapi import FastAPI

    from sedd.serve.app import _add_routes

    application = FastAPI(title="sedd")
    _add_routes(application, None)  # type: ignore[arg-type]  # no route is called
    return application.openapi()


def schema_type(schema: Mapping[str, Any]) -> str:
    """Return the type of a field and its limits in words."""
    if kinds := schema.get("anyOf"):
        return " or ".join(schema_type(kind) for kind in kinds)
    if "const" in schema:
        return f'`"{schema["const"]}"`'
    if "$ref" in schema:
        return f"object, [{schema['$ref'].split('/')[-1]}](#{schema['$ref'].split('/')[-1].lower()})"
    names = {"string": "text", "null": "`null`", "boolean": "`true` or `false`"}
    text, limits = str(names.get(kind := schema["type"], kind)), []
    if kind == "array":
        item = schema_type(schema["items"]).replace("text", "texts").replace("characters", "characters each")
        text = (
            f"list of {schema['minItems']} to {schema['maxItems']:,} {item}"
            if "minItems" in schema
            else f"list of {item}"
        )
    if kind == "object":
        text = f"object of {schema_type(schema['additionalProperties'])}"
    for key, word in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if key in schema:
            value = schema[key]
            limits.append(
                f"{word} {'2⁶³' if value == 2.0**63 else f'{value:,g}' if value < 1e6 else f'{int(value):,}'}"
            )
    if "maxLength" in schema:
        limits.append(f"≤ {schema['maxLength']:,} characters")
    return text + (f" ({', '.join(limits)})" if limits else "")


def field_rows(schema: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and meaning of fields of a request."""
    for name in names:
        field = schema["properties"][name]
        required = name in schema.get("required", ())
        default = "required" if required else f"`{json.dumps(field.get('default'))}`"
        yield code(name), schema_type(field), default, field.get("description", "")


def http_page() -> str:
    """Return the page of the HTTP interface."""
    document = openapi()
    schemas, posted, routes = document["components"]["schemas"], {}, []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            routes.append((f"`{method.upper()} {path}`", route["description"]))
            if body := route.get("requestBody"):
                reference = body["content"]["application/json"]["schema"]["$ref"]
                posted[path] = schemas[reference.split("/")[-1]]
    sampled = [schema["properties"] for schema in posted.values() if "steps" in schema["properties"]]
    modelled = [schema["properties"] for schema in posted.values() if "model" in schema["properties"]]
    every = [name for name in modelled[0] if all(fields.get(name) == modelled[0][name] for fields in modelled)]
    sampling = [name for name in sampled[0] if all(fields.get(name) == sampled[0][name] for fields in sampled)]
    sampling = [name for name in sampling if name not in every]
    head, parts = (
        ("field", "type", "default", "meaning"),
        [page_text.INTRODUCTION.replace("NOTE", NOTE), prose(page_text.RULES)],
    )
    parts += ["## Routes", table(("route", "what it returns"), routes)]
    first = next(iter(posted.values()))
    parts += ["## Fields of every request", page_text.EVERY, table(head, field_rows(first, every))]
    parts += ["## Sampling fields", page_text.SAMPLING, table(head, field_rows(first, sampling))]
    for path, schema in posted.items():
        own = [name for name in schema["properties"] if name not in (*every, *sampling)]
        parts += [f"## POST {path}", page_text.ROUTES[path], table(head, field_rows(schema, own))]
        nested = [name for name in own if "$ref" in json.dumps(schema["properties"][name])]
        for name in nested:
            reference = re.search(r'schemas/(\w+)"', json.dumps(schema["properties"][name]))
            assert reference
            inner = schemas[reference[1]]
            parts += [f"### {reference[1]}", table(head, field_rows(inner, inner["properties"]))]
        shared = page_text.REPLIES[page_text.SAME[path]] if path in page_text.SAME else {}
        fields = {name: meaning for name, meaning in page_text.REPLIES[path].items() if name not in shared}
        parts += [f"Reply, besides the fields of {code(page_text.SAME[path])}:" if shared else "Reply:"]
        parts.append(table(("field", "meaning"), ((code(name), meaning) for name, meaning in fields.items())))
    parts += ["## What a server states about itself", prose(page_text.READ)]
    for path in ("/v1/models", "/health", "/ready"):
        described = ((code(name), meaning) for name, meaning in page_text.REPLIES[path].items())
        parts += [f"### GET {path}", table(("field", "meaning"), described)]
    parts += [
        "## Streams: `stream`",
        prose(page_text.STREAM),
        "## Events of forming texts: `diffusing`",
        prose(page_text.EVENTS),
    ]
    for event, fields in page_text.EVENT_FIELDS.items():
        parts += [f"### {event}", table(("field", "meaning"), ((code(k), v) for k, v in fields.items()))]
    rows = ((code(name or None), status, when) for name, status, when in page_text.ERRORS)
    parts += ["## Errors", prose(page_text.ERROR_FORMAT), table(("code", "status", "when"), rows), page_text.END]
    return "\n\n".join(parts) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "http.md": http_page,
}


# Parts of pages --------------------------------------------------------------------------------------------


def limits() -> str:
    """Return the table of the largest counts."""
    named = {f"--{name.replace('_', '-')}": most for name, most in LIMITS.items()}
    for section, owner in typing.get_type_hints(RunConfig).items():
        for name, hint in typing.get_type_hints(owner, include_extras=True).items() if "Config" in str(owner) else ():
            rules = [rule for rule in getattr(hint, "__metadata__", ()) if "most" in getattr(rule, "keywords", ())]
            named |= {f"{section}.{name}": rule.keywords["most"] for rule in rules}
    rows = [(code(name), f"{most:,}") for name, most in named.items()]
    return table(("count", "at most"), [*rows, ("any other", f"{MAX_COUNT:,}")])


def limits_of_files() -> str:
    """Return the table of what a file may take."""
    rows = (
        ("a file that is read as a whole: templates, samples, results, logs", files.MAX_TEXT, "bytes"),
        ("JSON that describes a model, a run or data; a regular file, no device or pipe", files.MAX_RECORD, "bytes"),
        ("settings of a run in a file", yaml_file.MAX_SETTINGS, "bytes"),
        ("nesting of settings", yaml_file.MAX_NESTING, "levels"),
        ("`tokenizer.json`", bpe.MAX_DEFINITION, "bytes"),
        ("how many times as long a tokenizer may make a text", bpe.MAX_GROWTH, "times"),
        ("a line, row or cell of a data file, after decompression", tables.LONGEST_LINE, "characters"),
        ("a JSON document, a FASTA sequence", tables.LONGEST_WHOLE, "characters"),
        (
            "a row group of Parquet: the size above, or a larger multiple of what is stored",
            tables.MAX_EXPANSION,
            "times",
        ),
    )
    return table(("what", "at most"), ((what, f"{most:,} {unit}") for what, most, unit in rows))


def contract() -> list[str]:
    """Return the layers that import-linter checks, from the top."""
    layers: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0][
        "layers"
    ]
    return layers


def packages() -> str:
    """Return the packages and top modules, from the highest layer to the lowest, with their summaries."""
    source, lines = ROOT / "src/sedd", []
    for name in re.findall(r"\w+", " ".join(contract())):
        package = source / name / "__init__.py"
        shown, module = (f"{name}/", package) if package.is_file() else (f"{name}.py", source / f"{name}.py")
        lines.append(f"  {shown:<19}{tree.summary(module)}".rstrip())
    return "\n".join(["```", "src/sedd/", *lines, "```"])


def layers() -> str:
    """Return the layers as a code block."""
    return "\n".join(["```", *contract(), "```"])


REFERENCE = {
    "api": ("sedd", "sedd.diffusion", "sedd.model"),
    "diffusion": ("process", "schedule", "parameterization", "objectives", "divergence", "draws", "tensors"),
    **{name: (name,) for name in ("data", "evaluation", "exact", "hub", "likelihood", "nn", "ops")},
    **{name: (name,) for name in ("runtime", "serve", "tokenizer", "training")},
    "sampling": ("samplers", "reverse", "sampling_settings"),
}
"""The packages and modules that each page of the reference describes; `config.md` has all others."""


def modules(page: str) -> str:
    """Return the directives by which mkdocstrings shows the modules of a page."""
    root, found = ROOT / "src", dict[str, Path]()
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith("sedd.cli") and "._" not in name:
            found[name] = path
    pages: dict[str, list[str]] = {name: [] for name in (*REFERENCE, "config")}
    tops = {part.removeprefix("sedd."): name for name, parts in REFERENCE.items() for part in parts}
    for name in found:
        top = name.split(".")[1] if "." in name else name
        pages[tops.get(top, "config")].append(name)
    lines = []
    for name in pages[page]:
        tree = ast.parse(found[name].read_text())
        defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" for node in tree.body)
        hidden = "    options:\n      members: false\n" if found[name].stem == "__init__" and not defines else ""
        lines.append(f"::: {name}\n{hidden}")
    return "\n".join(lines)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    **{f"docs/reference/{page}.md": {"modules": partial(modules, page)} for page in (*REFERENCE, "config")},
    "docs/security.md": {"limits": limits, "limits of files": limits_of_files},
    "CONTRIBUTING.md": {"packages": packages, "layers": layers},
}


def with_parts(page: str) -> str:
    """Return a page with today's text between the comments of each of its parts."""
    text = (ROOT / page).read_text()
    for name, part in PARTS[page].items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}{part()}\n{end}{rest.split(end, 1)[1]}"
    return text


def written() -> dict[Path, str]:
    """Return what every page should hold."""
    whole = {PAGES / name: page() for name, page in GENERATED.items()}
    return whole | {ROOT / page: with_parts(page) for page in PARTS}


def stale() -> list[str]:
    """Return a line for every page that differs from what would be written."""
    return [
        f"{path.relative_to(ROOT)} is stale; run python experiments/reference_pages.py"
        for path, text in written().items()
        if not path.is_file() or path.read_text() != text
    ]


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="name the pages that are stale; write nothing")
    if parser.parse_args().check:
        lines = stale()
        print("\n".join(lines) or "the reference pages are up to date")
        sys.exit(bool(lines))
    for path, text in written().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
