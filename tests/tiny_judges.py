"""Hugging Face models small enough to enumerate, as judges in tests."""

import string
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

START = "<|endoftext|>"


def letters(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter, one for the first two together, and a start token."""
    vocab = {letter: id for id, letter in enumerate(alphabet)}
    vocab |= {alphabet[:2]: len(vocab), START: len(vocab) + 1}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(alphabet[0], alphabet[1])]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(START, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=START, eos_token=START)


def network(vocab_size: int, context: int = 48, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 with two layers of width 16, and weights large enough for a distribution far from uniform."""
    start = vocab_size - 1
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=context,
        n_embd=16,
        n_layer=2,
        n_head=2,
        initializer_range=0.5,
        bos_token_id=start,
        eos_token_id=start,
    )
    return GPT2LMHeadModel(config).eval()


def save(folder: Path, alphabet: str = string.ascii_lowercase + "Ġ", context: int = 48, seed: int = 0) -> Path:
    """Save a judge of lower-case words; ``Ġ`` is the space of byte-level tokenizers."""
    tokenizer = letters(alphabet)
    network(len(tokenizer), context, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


BLOCK = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
OUTSIDE = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}


def _named(name: str, weights: torch.Tensor) -> tuple[str, Any]:
    """Return the GGUF name and layout of a GPT-2 weight."""
    module, kind = name.removeprefix("transformer.").rsplit(".", 1)
    if module == "lm_head":
        return "output.weight", weights.numpy()
    if not module.startswith("h."):
        return f"{OUTSIDE[module]}.{kind}", weights.numpy()
    _, block, rest = module.split(".", 2)
    transposed = weights.T.contiguous() if kind == "weight" and weights.ndim == 2 else weights
    return f"blk.{block}.{BLOCK[rest]}.{kind}", transposed.numpy()


def save_gguf(path: Path, folder: Path) -> Path:
    """Convert the judge in ``folder`` to a GGUF file."""
    model, tokenizer = GPT2LMHeadModel.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    config, writer = model.config, gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == START else 1 for token in tokens])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, weights in model.state_dict().items():
        writer.add_tensor(*_named(name, weights.float()))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path
