"""The files app."""

from __future__ import annotations

from agentrl.env import tool
from agentrl.utils.errors import ToolError

from .apps import Apps, Json, Long, Short, has


class Files(Apps):
    """Text files in folders; a path such as /notes/plan.txt names a file."""

    @tool(inline=True, read_only=True)
    def list_folder(self, path: Short) -> list[str]:
        """Paths of the files and folders directly in a folder."""
        folder = self._folder(path)
        names = [*self.world["files"], *(name + "/" for name in self.world["folders"] if name != "/")]
        return sorted(name for name in names if _parent(name.rstrip("/")) == folder)

    @tool(inline=True, read_only=True)
    def find_files(self, name: Short) -> list[str]:
        """Paths of the files whose name holds a text."""
        return sorted(path for path in self.world["files"] if has(path.rpartition("/")[2], name))[:50]

    @tool(inline=True, read_only=True)
    def search_text(self, text: Short) -> list[str]:
        """Paths of the files whose content holds a text."""
        return sorted(path for path, row in self.world["files"].items() if has(row["text"], text))[:50]

    @tool(inline=True, read_only=True)
    def read_file(self, path: Short) -> Json:
        """A file's text and the addresses it is shared with."""
        return self._one("files", path, "file")

    @tool(inline=True, parallel=False)
    def write_file(self, path: Short, text: Long) -> str:
        """Create a file, or replace the text of one."""
        self._folder(_parent(_clean(path)))
        old = self.world["files"].get(path, {"shared": []})
        self.world["files"][path] = {"text": text, "shared": old["shared"]}
        return "written"

    @tool(inline=True, parallel=False)
    def append_file(self, path: Short, line: Long) -> str:
        """Add a line at the end of a file."""
        row = self._one("files", path, "file")
        row["text"] = f"{row['text']}\n{line}"[:20000]
        return "appended"

    @tool(inline=True, parallel=False)
    def create_folder(self, path: Short) -> str:
        """Create a folder in an existing one."""
        path = _clean(path)
        self._folder(_parent(path))
        if path in self.world["folders"] or path in self.world["files"]:
            raise ToolError(f"{path} exists")
        self.world["folders"].append(path)
        return "created"

    @tool(inline=True, parallel=False)
    def move_file(self, path: Short, folder: Short) -> str:
        """Move a file into another folder; returns its new path."""
        row, target = self._target(path, folder)
        del self.world["files"][path]
        self.world["files"][target] = row
        return target

    @tool(inline=True, parallel=False)
    def copy_file(self, path: Short, folder: Short) -> str:
        """Copy a file into another folder; returns the copy's path. The copy is shared with nobody."""
        row, target = self._target(path, folder)
        self.world["files"][target] = {"text": row["text"], "shared": []}
        return target

    @tool(inline=True, parallel=False)
    def delete_file(self, path: Short) -> str:
        """Delete a file."""
        self._one("files", path, "file")
        del self.world["files"][path]
        return "deleted"

    @tool(inline=True, parallel=False)
    def share_file(self, path: Short, email: Short) -> str:
        """Give an address access to a file."""
        row = self._one("files", path, "file")
        if email not in row["shared"]:
            row["shared"].append(email)
        return "shared"

    def _folder(self, path: str) -> str:
        path = path.rstrip("/") or "/"
        if path not in self.world["folders"]:
            raise ToolError(f"no folder {path[:80]!r}")
        return path

    def _target(self, path: str, folder: str) -> tuple[dict[str, Json], str]:
        row = self._one("files", path, "file")
        target = f"{self._folder(folder).rstrip('/')}/{path.rpartition('/')[2]}"
        if target in self.world["files"]:
            raise ToolError(f"{target} exists")
        return row, target


def _parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _clean(path: str) -> str:
    parts = path.rstrip("/").split("/")
    if parts[0] != "" or len(parts) < 2 or any(part.strip() in ("", ".", "..") for part in parts[1:]):
        raise ToolError(f"{path[:80]!r} is not a path such as /notes/plan.txt")
    return "/".join(parts)
