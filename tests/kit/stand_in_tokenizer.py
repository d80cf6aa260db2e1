"""Makes byte-level tokenizers that stand in for a model family's, with the family's special tokens.

Real tokenizers come from the hub, which tests do not reach. The stand-ins also show how a chat format handles ids: as
in real tokenizers, a special token is one id, other text is several ids, and adjacent pieces may merge.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_MERGES = 96
# Tags stand next to line ends, so that tokens merge across the borders of the pieces that a format joins.
_CORPUS = [
    "user\nMultiply 12 by 34.\n\nassistant\nThe product is 408.\n",
    '<tool>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool>\n\n',
    "<function=multiply>\n<parameter=a>\n12\n</parameter>\n</function>\n",
] * 4


def stand_in_tokenizer(
    special_tokens: Sequence[str],
    eos: str,
    *,
    bos: str | None = None,
    chat_template: str | None = None,
    name: str = "",
) -> PreTrainedTokenizerFast:
    """Make a tokenizer that encodes every text and decodes it exactly.

    Args:
        special_tokens: Special tokens, one id each. `eos` and `bos` are among them.
        eos: Token that ends a text.
        bos: Token that begins a text; None for none.
        chat_template: The Jinja chat template; None for none.
        name: Name of the model, as `name_or_path`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + _MERGES, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        name_or_path=name,
    )
