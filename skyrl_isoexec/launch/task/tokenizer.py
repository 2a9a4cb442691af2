"""One symbol per character, sixteen in all, so that every tensor-parallel degree up to 16 divides the vocabulary.

The chat template renders the content of the messages and nothing else: SkyRL always applies one, and this model reads
the bare characters of a problem.
"""

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
SYMBOLS = (PAD, EOS, BOS, UNK, *"0123456789", "+", "=")
"""The vocabulary; a symbol's index is its token id."""
IDS = {symbol: index for index, symbol in enumerate(SYMBOLS)}

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer as transformers' own fast class. A character that is not in the vocabulary becomes `<unk>`."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, bos_token=BOS, unk_token=UNK, model_max_length=1024
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(text: str) -> list[int]:
    """Token ids of a problem or an answer, none added to it. Raises KeyError for a foreign character."""
    return [IDS[symbol] for symbol in re.findall(r"<\w+>|[\s\S]", text)]


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files into `folder`, where `AutoTokenizer.from_pretrained` finds them."""
    build_tokenizer().save_pretrained(str(folder))
