"""The mail app."""

from __future__ import annotations

from agentrl.env import tool
from agentrl.utils.errors import ToolError

from .apps import Apps, Json, Long, Short, has


class Mail(Apps):
    """Mail in folders. Reading a mail does not mark it; `mark_mail` does."""

    @tool(inline=True, read_only=True)
    def list_mail_folders(self) -> list[str]:
        """Names of all mail folders."""
        return sorted(self.world["mail_folders"])

    @tool(inline=True, read_only=True)
    def list_mail(self, folder: Short) -> list[Json]:
        """The mail of a folder: ids, senders and subjects."""
        self._mail_folder(folder)
        return [self._line(key, row) for key, row in self.world["mail"].items() if row["folder"] == folder][:50]

    @tool(inline=True, read_only=True)
    def search_mail(self, sender: Short = "", subject: Short = "", unread_only: bool = False) -> list[Json]:
        """Received mail whose sender and subject hold the given texts.

        Args:
            sender: part of the sender's name or address
            subject: part of the subject
            unread_only: leave out mail that is marked as read
        """
        return [
            self._line(key, row)
            for key, row in self.world["mail"].items()
            if row["folder"] != "sent"
            and has(row["sender"], sender)
            and has(row["subject"], subject)
            and not (unread_only and row["read"])
        ][:50]

    @tool(inline=True, read_only=True)
    def read_mail(self, mail_id: Short) -> Json:
        """A mail with its text."""
        return {"mail_id": mail_id, **self._one("mail", mail_id, "mail")}

    @tool(inline=True, parallel=False)
    def send_mail(self, to: Short, subject: Short, body: Long) -> str:
        """Send a mail to one address."""
        return self._send([_address(to)], subject, body, None)

    @tool(inline=True, parallel=False)
    def reply_mail(self, mail_id: Short, body: Long) -> str:
        """Answer a mail; the answer goes to its sender."""
        row = self._one("mail", mail_id, "mail")
        address = row["sender"].rpartition("<")[2].rstrip(">")
        return self._send([address], f"Re: {row['subject']}", body, None)

    @tool(inline=True, parallel=False)
    def forward_mail(self, mail_id: Short, to: Short) -> str:
        """Send a mail on, unchanged, to one address."""
        row = self._one("mail", mail_id, "mail")
        return self._send([_address(to)], f"Fwd: {row['subject']}", row["body"], row["sender"])

    @tool(inline=True, parallel=False)
    def move_mail(self, mail_id: Short, folder: Short) -> str:
        """Move a mail into another folder."""
        row = self._one("mail", mail_id, "mail")
        self._mail_folder(folder)
        row["folder"] = folder
        return "moved"

    @tool(inline=True, parallel=False)
    def delete_mail(self, mail_id: Short) -> str:
        """Delete a mail for good."""
        self._one("mail", mail_id, "mail")
        del self.world["mail"][mail_id]
        return "deleted"

    @tool(inline=True, parallel=False)
    def mark_mail(self, mail_id: Short, read: bool) -> str:
        """Mark a mail as read or unread."""
        self._one("mail", mail_id, "mail")["read"] = read
        return "marked"

    @tool(inline=True, parallel=False)
    def flag_mail(self, mail_id: Short, flagged: bool = True) -> str:
        """Put a flag on a mail, or take it off."""
        self._one("mail", mail_id, "mail")["flagged"] = flagged
        return "flagged" if flagged else "not flagged"

    @tool(inline=True, parallel=False)
    def create_mail_folder(self, name: Short) -> str:
        """Create a mail folder."""
        if not name.strip() or name in self.world["mail_folders"]:
            raise ToolError(f"folder {name[:80]!r} exists or has no name")
        self.world["mail_folders"].append(name)
        return "created"

    def _mail_folder(self, name: str) -> None:
        if name not in self.world["mail_folders"]:
            raise ToolError(f"no mail folder {name[:80]!r}; there are {', '.join(self.world['mail_folders'])[:300]}")

    def _line(self, key: str, row: Json) -> Json:
        return {"mail_id": key, **{name: row[name] for name in ("folder", "sender", "subject", "read", "flagged")}}

    def _send(self, to: list[str], subject: str, body: str, origin: str | None) -> str:
        self.world["mail"][self._new_id("m")] = {
            "folder": "sent", "sender": "me", "to": to, "subject": subject, "body": body, "read": True,
            "flagged": False, "origin": origin,
        }  # fmt: skip
        return f"sent to {to[0]}"


def _address(text: str) -> str:
    text = text.strip()
    if text.count("@") != 1 or " " in text or text.startswith("@") or text.endswith("@"):
        raise ToolError(f"{text[:80]!r} is not a mail address")
    return text
