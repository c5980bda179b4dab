"""The contacts app."""

from __future__ import annotations

from agentrl.env import tool
from agentrl.utils.errors import ToolError

from .apps import Apps, Json, Short, has


class Contacts(Apps):
    """People by mail address, in groups."""

    @tool(inline=True, read_only=True)
    def find_contacts(self, name: Short) -> list[Json]:
        """The contacts whose name holds a text."""
        people = self.world["contacts"].items()
        return [{"email": email, **row} for email, row in people if has(row["name"], name)][:50]

    @tool(inline=True, read_only=True)
    def get_contact(self, email: Short) -> Json:
        """The contact with an address."""
        return {"email": email, **self._one("contacts", email, "contact")}

    @tool(inline=True, parallel=False)
    def add_contact(self, name: Short, email: Short, phone: Short, company: Short) -> str:
        """Add a contact."""
        if email in self.world["contacts"] or "@" not in email:
            raise ToolError(f"{email[:80]!r} is taken or no mail address")
        self.world["contacts"][email] = {"name": name, "phone": phone, "company": company, "groups": []}
        return "added"

    @tool(inline=True, parallel=False)
    def update_contact(self, email: Short, phone: Short | None = None, company: Short | None = None) -> str:
        """Change a contact's phone number or company.

        Args:
            email: the contact's address
            phone: the new number; left out, it stays
            company: the new company; left out, it stays
        """
        row = self._one("contacts", email, "contact")
        if phone is not None:
            row["phone"] = phone
        if company is not None:
            row["company"] = company
        return "updated"

    @tool(inline=True, parallel=False)
    def delete_contact(self, email: Short) -> str:
        """Delete a contact."""
        self._one("contacts", email, "contact")
        del self.world["contacts"][email]
        return "deleted"

    @tool(inline=True, read_only=True)
    def list_groups(self) -> list[str]:
        """Names of all groups."""
        return sorted({group for row in self.world["contacts"].values() for group in row["groups"]})

    @tool(inline=True, read_only=True)
    def list_group(self, group: Short) -> list[Json]:
        """The members of a group."""
        people = self.world["contacts"].items()
        found = [{"email": email, "name": row["name"]} for email, row in people if group in row["groups"]]
        if not found:
            raise ToolError(f"no group {group[:80]!r}")
        return found

    @tool(inline=True, parallel=False)
    def add_to_group(self, email: Short, group: Short) -> str:
        """Put a contact into a group."""
        row = self._one("contacts", email, "contact")
        if group not in row["groups"]:
            row["groups"].append(group)
        return "added"

    @tool(inline=True, parallel=False)
    def remove_from_group(self, email: Short, group: Short) -> str:
        """Take a contact out of a group."""
        row = self._one("contacts", email, "contact")
        if group not in row["groups"]:
            raise ToolError(f"{email[:80]!r} is not in {group[:80]!r}")
        row["groups"].remove(group)
        return "removed"
