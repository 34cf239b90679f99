"""Files as users have them: odd bytes, line ends of Windows, molecules, lists of integers, labels, stored settings."""

import json
import random
from pathlib import Path

from runs import Sedd, ok

STEP = ["--steps", "1", *("--set", "model.width=32", "--set", "model.depth=1", "--set", "train.eval_sequences=8")]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def prose(size: int) -> bytes:
    draw = random.Random(0)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 8))) for _ in range(300)]
    return " ".join(draw.choices(words, k=size // 6)).encode()


def test_odd_bytes_and_line_ends_are_told(sedd: Sedd, tmp_path: Path) -> None:
    """In training, where they do not choose another tokenizer, and in evaluation."""
    file, content = tmp_path / "book.txt", prose(300_000).replace(b" ", b"\r\n", 3)
    file.write_bytes(content[:1000] + b"\xe9" + content[1000:] + b"\xe9")
    done = sedd("train", file, *STEP, "--out", tmp_path / "run")
    ok(done)
    assert "tokenizer bpe:" in done.stderr
    (tmp_path / "part.txt").write_bytes(file.read_bytes()[:5000])
    seen = sedd("eval", tmp_path / "run", tmp_path / "part.txt", "--protocol", "strict", "--json", "--draws", "2")
    ok(seen)
    for told, words in ((done.stderr, f"2 of {len(content) + 2:,} bytes"), (seen.stderr, "1 of 5,000")):
        assert words in told
        assert "offset 1,000, in line 4 of" in told
        assert "--encoding latin-1" in told
        assert "3 line ends are CRLF" in told
    assert json.loads(seen.stdout)["bits_per_char"] > 0
