"""Results of calls as messages of the conversation."""

from __future__ import annotations

from agentrl.trajectory import Message, ToolResult, Trajectory, Turn


def note(record: Trajectory, turn: Turn, result: ToolResult) -> None:
    """Add a call's result to its turn and to the conversation, both in the order of the turn's calls, in whatever order they
    end."""
    order = {call.id: place for place, call in enumerate(turn.message.tool_calls)}

    def later(call_id: str | None) -> bool:
        return order.get(call_id or "", -1) > order.get(result.call_id, len(order))

    at, place = len(record.messages), len(turn.results)
    while place and later(turn.results[place - 1].call_id):
        place -= 1
    while at and record.messages[at - 1].role == "tool" and later(record.messages[at - 1].tool_call_id):
        at -= 1
    turn.results.insert(place, result)
    record.messages.insert(at, as_message(result))


def as_message(result: ToolResult) -> Message:
    return Message("tool", result.content, tool_call_id=result.call_id, name=result.name, images=result.images)
