"""Additions, the quickstart's problems: their text, their random draw, and a character-level tokenizer for them."""

import random
from collections.abc import Iterator

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

Addition = tuple[int, int]

PROMPT_TEMPLATE = "{prompt}="
"""What stands around a problem when the model sees it; the grid's ``sampling.prompt_template`` must say the same."""
LONGEST_SEQUENCE = 64
"""Positions of the model, in tokens."""

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = {token: index for index, token in enumerate([PAD, EOS, *sorted(ByteLevel.alphabet())])}
"""258 tokens: two special ones, and one for each byte, in byte-level notation (a space is ``Ġ``)."""


def random_addition(generator: random.Random, digits: tuple[int, int]) -> Addition:
    """Two operands, each with a length drawn evenly from ``digits`` (both ends included), then evenly of that length."""
    first, second = (generator.randint(*digits) for _ in range(2))
    return generator.randrange(10 ** (first - 1), 10**first), generator.randrange(
        10 ** (second - 1), 10**second
    )


def distinct_additions(generator: random.Random, digits: tuple[int, int]) -> Iterator[Addition]:
    """Random additions without end, of which no two have the same operands in any order.

    It slows down where it has used up most of the pairs that there are (5e9 with 2-5 digits).
    """
    seen: set[Addition] = set()
    while True:
        first, second = random_addition(generator, digits)
        pair = (min(first, second), max(first, second))
        if pair not in seen:
            seen.add(pair)
            yield first, second


def prompt_of(addition: Addition) -> str:
    """The problem as a problem set states it, such as ``123+4567``; the template adds the equals sign."""
    return f"{addition[0]}+{addition[1]}"


def answer_of(addition: Addition) -> str:
    """The sum in decimal digits."""
    return str(addition[0] + addition[1])


def character_tokenizer() -> Qwen2Tokenizer:
    """One token per ASCII character (other characters take one per byte); nothing is added, and decoding is exact.

    It is Qwen2's own tokenizer without a merge, since ``AutoTokenizer`` builds that class for a Qwen2 model whatever
    the folder's ``tokenizer_config.json`` names. With all bytes in the vocabulary no text is unknown to it.
    """
    return Qwen2Tokenizer(
        vocab=dict(VOCABULARY),
        merges=[],
        unk_token=None,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=LONGEST_SEQUENCE,
    )
