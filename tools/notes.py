"""Notes of a policy, stored outside of the conversation, so that no context policy removes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.data.trajectory import Json
from agentrl.env import ToolSet, tool
from agentrl.utils.errors import ToolError

Title = Annotated[str, Field(min_length=1, max_length=80)]


class Notes(ToolSet):
    """Notes of one episode, texts by title."""

    name = "notes"

    def __init__(self, *, most: Annotated[int, Field(ge=1)] = 50, characters: Annotated[int, Field(ge=1)] = 2000) -> None:
        """At most `most` notes of at most `characters` each."""
        self.most, self.characters = most, characters
        self.notes: dict[str, str] = {}

    def state(self) -> Json:
        return dict(self.notes)

    @tool(inline=True, parallel=False)
    def write_note(self, title: Title, text: str) -> str:
        """Keep a text for later; a note of the same title is replaced.

        Args:
            title: what to find it under
            text: the note; an empty one is removed
        """
        if len(text) > self.characters:
            raise ToolError(f"the note has {len(text)} characters, and at most {self.characters} are kept")
        if not text:
            return "removed" if self.notes.pop(title, None) is not None else "there was none"
        if title not in self.notes and len(self.notes) >= self.most:
            raise ToolError(f"there are {self.most} notes already; replace or remove one")
        self.notes[title] = text
        return "noted"

    @tool(inline=True, read_only=True)
    def read_notes(self, title: str = "") -> str:
        """A note, or the titles of all notes.

        Args:
            title: whose text to read; left out, the titles are listed
        """
        if not title:
            return "\n".join(self.notes) or "(no notes)"
        if title not in self.notes:
            raise ToolError(f"no note {title[:80]!r}; there are: {', '.join(self.notes) or 'none'}"[:1000])
        return self.notes[title]
