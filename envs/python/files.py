"""Which of the files that a program left are there for the next one."""

from __future__ import annotations

from agentrl.contrib.sandboxes.contract import FileInfo, Sandbox

MOST, DEEPEST, NAMED = 32, 4, 20


async def keep_files(box: Sandbox) -> tuple[dict[str, int], list[str]]:
    """Leave in the sandbox what the next program may find: regular files within the limits (`MOST` files, the sizes of the
    spec, `DEEPEST` folders deep, with a name in Unicode), in folders as they are needed. Returns their sizes, and the names of
    the first of the others."""
    spec = box.spec
    kept: dict[str, bytes] = {}
    dropped: list[str] = []
    total = 0
    for info in sorted(await box.entries(), key=lambda info: (info.path.count("/"), info.path)):
        if "__pycache__" in info.path.split("/")[:-1]:
            continue
        small = info.size <= (spec.file_size or info.size) and total + info.size <= (spec.disk or total + info.size)
        if small and len(kept) < MOST and _may_stay(info):
            kept[info.path] = await box.read(info.path)
            total += info.size
        else:
            dropped.append("/".join(info.path.split("/")[: DEEPEST + 1]))
    # Everything anew, so that no folder, link or mode is there that the next program cannot have made.
    await box.remove(["."])
    await box.write(kept)
    names = [name.encode(errors="replace").decode() for name in dict.fromkeys(dropped)]
    return {name: len(content) for name, content in kept.items()}, names[:NAMED]


def _may_stay(info: FileInfo) -> bool:
    is_text = not any("\ud800" <= letter <= "\udfff" for letter in info.path)  # Linux allows any bytes in a name
    return info.regular and is_text and info.path.count("/") <= DEEPEST
