"""A tokenizer without a vocabulary of words: one token a byte, and the special tokens of Qwen."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

NUM_BYTES = 256
LITERALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL_TOKENS = {
    f"{name}_token_id": NUM_BYTES + LITERALS.index(literal)
    for name, literal in (
        ("vision_start", "<|vision_start|>"),
        ("vision_end", "<|vision_end|>"),
        ("image", "<|image_pad|>"),
        ("video", "<|video_pad|>"),
    )
}


def tokenizer_json() -> str:
    """The tokenizer as the text of a tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(literal, special=True, normalized=False) for literal in LITERALS])
    return tokenizer.to_str()
