"""Text files: from bytes to text, in an encoding."""

import codecs
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple, final


@final
class TextEncoding(NamedTuple):
    """How the bytes of a file become text."""

    name: str = "utf-8"
    keeps_bytes: bool = False
    """Whether bytes that are not UTF-8 are kept, as Python's ``surrogateescape`` does, for a tokenizer of bytes."""

    @classmethod
    def for_tokenizer(cls, kind: str, name: str = "utf-8") -> "TextEncoding":
        """Return the encoding called ``name``, for a tokenizer of this kind; an unknown one is refused."""
        try:
            known = codecs.lookup(name).name
            b"aaaa".decode(name, "ignore")  # raises for a codec that is no encoding of text, such as base64
        except LookupError:
            raise ValueError(
                f"encoding is {name!r}; name one that Python reads, such as utf-8, latin-1, cp1252 or utf-16"
            ) from None
        return cls(known, keeps_bytes=kind == "bytes" and known == "utf-8")


UTF8 = TextEncoding()


@final
class TextFile(NamedTuple):
    """An open text file."""

    path: Path
    stream: BufferedIOBase
    encoding: TextEncoding

    def decode(self, size: int) -> Iterator[str]:
        """Yield the text, ``size`` bytes at a time, without cutting a character; a byte order mark is dropped."""
        name, keeps_bytes = self.encoding
        decoder = codecs.getincrementaldecoder(name)("surrogateescape" if keeps_bytes else "strict")
        read, waiting, lines = 0, 0, 0  # bytes read, bytes of them that begin a character, line ends decoded
        is_first = True
        while block := self.stream.read(size):
            if name == "utf-8" and 0 in block:
                raise ValueError(
                    f"{self.path} holds zero bytes and is not text; name a text file, .npy for integers, or its "
                    "encoding, as in --encoding utf-16"
                )
            try:
                text = decoder.decode(block)
            except UnicodeError as error:
                raise self._wrong_encoding(error, read - waiting, lines) from None
            read, waiting, lines = read + len(block), len(decoder.getstate()[0]), lines + text.count("\n")
            text = text.removeprefix("\ufeff") if is_first else text
            is_first = False
            if text:
                yield text
        try:
            text = decoder.decode(b"", final=True)
        except UnicodeError as error:  # the file ends inside a character
            raise self._wrong_encoding(error, read - waiting, lines) from None
        if text:
            yield text

    def _wrong_encoding(self, error: UnicodeError, offset: int, lines: int) -> ValueError:
        """Return the error of a file that has another encoding.

        Args:
            error: The decoder's error.
            offset: Offset in the file of the bytes that were decoded.
            lines: Line ends before them.
        """
        name = self.encoding.name
        where = str(error)
        if isinstance(error, UnicodeDecodeError):
            line = lines + 1 + error.object[: error.start].decode(name, "ignore").count("\n")
            byte, offset = error.object[error.start], offset + error.start
            where = f"it has the byte 0x{byte:02x} at offset {offset:,}, in line {line:,}"
        advice = (
            "name its encoding, as in --encoding latin-1; a tokenizer of bytes reads such bytes as they are"
            if name == "utf-8"
            else "name the encoding that it has with --encoding"
        )
        return ValueError(f"{self.path} is not {name.upper()}: {where}; {advice}")
