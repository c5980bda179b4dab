"""An id that the tokenizer has no token for is seen in the text."""

from agentrl.render import make_renderer
from agentrl.render.base import Codec
from agentrl.trainer.pretrained import packaged_tokenizer


def test_an_id_without_a_token_is_a_replacement_character() -> None:
    tokenizer = packaged_tokenizer(512)
    codec = Codec(tokenizer)
    ids = codec.encode("a word and another")
    assert codec.decode([]) == "" and codec.decode(ids) == "a word and another"
    assert codec.decode([*ids[:1], 400, -1, 2**40, *ids[1:]]) == codec.decode(ids[:1]) + "\ufffd" * 3 + codec.decode(ids[1:])
    assert make_renderer(tokenizer).parse([*ids, 401], "length").content == "a word and another\ufffd"
