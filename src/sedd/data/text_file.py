"""Text files: from stored bytes, which .gz, .xz, .bz2 and .zst files compress, to text in an encoding."""

import bz2
import codecs
import gzip
import importlib
import lzma
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, final

from sedd.extras import install_hint
from sedd.registry import TOKENIZERS
from sedd.tokenizer import Tokenizer

OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
COMPRESSED = (*OPENERS, ".zst")
MOST_ODD = 1 / 1000  # largest share of bytes that are not UTF-8 in data that other tokenizers than bytes read
_ODD_BYTES = re.compile("[\udc80-\udcff]+")
_KEEPING = ("bytes", "bpe", "gpt2")
_ADVICE = "name its encoding, as in --encoding latin-1; a tokenizer of bytes reads such bytes as they are"


def open_decompressed(file: Path, raw: BufferedReader) -> AbstractContextManager[BufferedIOBase]:
    """Decompress ``raw`` according to the file name's ending; a file that is not compressed passes through."""
    suffix = file.suffix.lower()
    opened: AbstractContextManager[BufferedIOBase] = nullcontext(raw)
    if suffix == ".zst":  # Arrow notices a truncated file, which the reader of the library zstandard does not
        opened = import_optional("pyarrow", str(file)).input_stream(raw, compression="zstd")
    elif suffix in OPENERS:
        opened = OPENERS[suffix](raw)
    return opened


def import_optional(module: str, source: str) -> Any:
    """Import a package of the extra `data`, or raise ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"{source} needs the package {package}; install it: {install_hint('data')}") from None


@final
@dataclass
class TextEncoding:
    """How the bytes of files become text, and counts of what was read with it that is not plain text."""

    name: str = "utf-8"
    kept: float = 0.0  # the largest share of bytes that are not UTF-8 and are kept, as ``surrogateescape`` does
    bytes: int = 0
    odd_bytes: int = 0
    first_odd: str = ""
    line_ends: int = 0  # line ends that are CRLF
    first_file: str = ""

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer | str, name: str = "utf-8") -> "TextEncoding":
        """Return the encoding called ``name`` for a tokenizer or its name; an unknown encoding is rejected."""
        try:
            known = codecs.lookup(name).name
            b"aaaa".decode(name, "ignore")  # raises for a codec that is no encoding of text, such as base64
        except LookupError:
            raise ValueError(f"encoding is {name!r}; name one of Python's, such as utf-8 or latin-1") from None
        if isinstance(tokenizer, str):
            kind = tokenizer.partition(":")[0]
            keeps_bytes = kind in _KEEPING or (kind not in TOKENIZERS.names and Path(tokenizer).exists())
        else:
            kind, keeps_bytes = tokenizer.kind, tokenizer.keeps_bytes
        return cls(known, (1.0 if kind == "bytes" else MOST_ODD) if keeps_bytes and known == "utf-8" else 0.0)

    @property
    def has_many_odd(self) -> bool:
        """Whether only a tokenizer of bytes reads these bytes."""
        return self.odd_bytes > MOST_ODD * self.bytes

    def messages(self) -> list[str]:
        """Return one line about bytes that are not UTF-8, and one about line ends CRLF, if there are any."""
        lines = []
        if self.odd_bytes:
            why = f" (more than 1 in {1 / MOST_ODD:,.0f}, which needs the tokenizer of bytes)" * self.has_many_odd
            lines.append(
                f"{self.odd_bytes:,} of {self.bytes:,} bytes are not UTF-8{why}, the first is {self.first_odd}; they "
                "are kept as bytes; if the text has another encoding, name it, as in --encoding latin-1"
            )
        if self.line_ends:
            lines.append(f"{self.line_ends:,} line ends are CRLF, from {self.first_file} on; they are read as LF")
        return lines

    def check(self) -> None:
        """Raise ValueError if more bytes are not UTF-8 than are kept."""
        if self.has_many_odd and self.kept < 1:
            raise ValueError(
                f"more than 1 in {1 / MOST_ODD:,.0f} bytes are not UTF-8, the first is {self.first_odd}; {_ADVICE}"
            )


@final
class TextFile(NamedTuple):
    """An open text file."""

    path: Path
    stream: BufferedIOBase
    encoding: TextEncoding

    def decode_running_text(self, size: int) -> Iterator[str]:
        """Yield the text as `decode` does, with LF for line ends that are CRLF."""
        end = ""
        for part in self.decode(size):
            text = end + part
            end = "\r" if text.endswith("\r") else ""
            text = text.removesuffix("\r")
            if count := text.count("\r\n"):
                self.encoding.line_ends += count
                self.encoding.first_file = self.encoding.first_file or self.path.name
                text = text.replace("\r\n", "\n")
            if text:
                yield text
        if end:
            yield end

    def decode(self, size: int) -> Iterator[str]:
        """Yield the text, ``size`` bytes at a time, without cutting a character; a byte order mark is dropped."""
        name, kept = self.encoding.name, self.encoding.kept
        decoder = codecs.getincrementaldecoder(name)("surrogateescape" if kept else "strict")
        read, offset, lines = 0, 0, 0  # bytes read, and of them decoded; line ends decoded
        is_last = False
        while not is_last:
            block = self.stream.read(size)
            is_last = not block
            if name == "utf-8" and 0 in block:
                raise ValueError(f"{self.path} holds zero bytes, so it is not text, or needs --encoding utf-16")
            try:
                text = decoder.decode(block, final=is_last)
            except UnicodeError as error:  # at the end: the file ends inside a character
                where, advice = str(error), "name the encoding that it has with --encoding"
                if isinstance(error, UnicodeDecodeError):
                    line = lines + 1 + error.object[: error.start].decode(name, "ignore").count("\n")
                    where = f"it has the byte {_place(error.object[error.start], offset + error.start, line)}"
                advice = _ADVICE if name == "utf-8" else advice
                raise ValueError(f"{self.path} is not {name.upper()}: {where}; {advice}") from None
            self.encoding.bytes += len(block)
            if kept and not text.isascii() and (runs := list(_ODD_BYTES.finditer(text))):
                if not self.encoding.odd_bytes:
                    before, byte = text[: runs[0].start()], ord(runs[0].group()[0]) - 0xDC00
                    place = _place(byte, offset + len(before.encode()), lines + 1 + before.count("\n"))
                    self.encoding.first_odd = f"{place} of {self.path.name}"
                self.encoding.odd_bytes += sum(len(run.group()) for run in runs)
            lines += text.count("\n")
            text = text if offset else text.removeprefix("\ufeff")
            read += len(block)
            offset = read - len(decoder.getstate()[0])  # without the beginning of a character
            if text:
                yield text


def _place(byte: int, offset: int, line: int) -> str:
    return f"0x{byte:02x} at offset {offset:,}, in line {line:,}"
