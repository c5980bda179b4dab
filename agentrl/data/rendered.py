"""A conversation as the tokens that a policy would have seen and sampled: ledgers, as an episode has them."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.data.chats import Chat
from agentrl.errors import BadRowError, RenderError
from agentrl.render.base import Renderer
from agentrl.trajectory import Message, TokenLedger, Trajectory


def rendered(chat: Chat, renderer: Renderer) -> list[TokenLedger]:
    """The ledgers of a chat: `sampled` marks the tokens of trained messages (logprob 0, version 0). There are several if the
    model's chat template rewrites earlier turns.

    Raises BadRowError if the template cannot write it, or writes calls that are then read as others.
    """
    try:
        return _rendered(chat, renderer.with_tools(chat.tools))
    except RenderError as problem:
        raise BadRowError(f"the model's chat template cannot write it: {problem}") from None


def _rendered(chat: Chat, renderer: Renderer) -> list[TokenLedger]:
    messages, places = chat.messages, [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
    if places[0] == 0:
        raise BadRowError("it begins with an assistant's message, which no prompt precedes")
    begun = places[0]
    ledger = TokenLedger()
    ledger.append_context(renderer.start(messages[:begun], chat.tools), 0)
    ledgers = [ledger]
    for turn, place in enumerate(places):
        ids = _turn(messages[place], renderer, place)
        if chat.trained[place]:
            ledgers[-1].append_sampled(ids, [0.0] * len(ids), [0] * len(ids), turn)
        else:
            ledgers[-1].append_context(ids, turn)
        if turn + 1 == len(places):
            break
        until = places[turn + 1]
        following = messages[place + 1 : until]
        if renderer.keeps(messages[place], following, messages[:place], begun):
            ledgers[-1].append_context(renderer.extend("stop", following, ids[-1]), turn + 1)
        else:
            begun = until
            ledgers.append(TokenLedger())
            ledgers[-1].append_context(renderer.start(messages[:until], chat.tools), turn + 1)
    return [ledger for ledger in ledgers if ledger.sampled_tokens]


def _turn(message: Message, renderer: Renderer, place: int) -> list[int]:
    """The tokens of an assistant's message, if a policy that samples them makes the same calls."""
    ids = renderer.assistant(message)
    if message.tool_calls:
        read = renderer.parse(ids, "stop").tool_calls
        if [(call.name, call.arguments) for call in read] != [(call.name, call.arguments) for call in message.tool_calls]:
            raise BadRowError(f"messages[{place}]: its calls, as the model's chat template writes them, are read as others")
    return ids


def chat_of(episode: Trajectory) -> Chat:
    """The messages of an episode as a chat, to render them anew; turns that it was given, and those before it branched off
    another, are context. Raises BadRowError if its conversation was rewritten."""
    if episode.rewrites:
        raise BadRowError("a context policy rewrote its conversation, so its messages do not say what the policy saw")
    turn, trained, begins = 0, list[bool](), max(episode.given, episode.branch_turn)
    for message in episode.messages:
        trained.append(message.role == "assistant" and turn >= begins)
        turn += message.role == "assistant"
    end = max((n for n, message in enumerate(episode.messages) if message.role == "assistant"), default=-1) + 1
    if not any(trained):
        raise BadRowError("no turn that its policy sampled")
    return Chat(tuple(episode.messages[:end]), tuple(trained[:end]), tuple(episode.tools))


def says_the_same(episode: Trajectory, renderer: Renderer, texts: Sequence[str]) -> bool:
    """Whether the sampled tokens of an episode's turns are what its messages say, read by this renderer; if not, they are
    another tokenizer's. `texts`: the turns' sampled tokens as this tokenizer decodes them."""
    renderer = renderer.with_tools(episode.tools)
    for turn, text in zip(episode.turns, texts, strict=True):
        ids = turn_ids(episode, turn.index)
        if not ids or (turn.message.content in text and all(call.raw in text for call in turn.message.tool_calls)):
            continue
        read = renderer.parse(ids, turn.finish)
        if (read.content, [call.name for call in read.tool_calls]) != (
            turn.message.content,
            [call.name for call in turn.message.tool_calls],
        ):
            return False
    return True


def turn_ids(episode: Trajectory, turn: int) -> list[int]:
    """The sampled tokens of a turn, over all ledgers; none if it was given."""
    return [
        int(token) for ledger in episode.ledgers for token in ledger.token_ids[ledger.sampled & (ledger.turns == turn)].tolist()
    ]
