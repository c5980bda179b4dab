import pytest

from agentrl.render.chatml import CHATML_TEMPLATE
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer


@pytest.fixture(scope="session", params=["tags are added tokens", "tags are ordinary text"])
def chatml_tokenizer(request):
    tokens = CONTROL_TOKENS if request.param == "tags are added tokens" else CONTROL_TOKENS[:2]
    return build_tokenizer(tokens, CHATML_TEMPLATE)
