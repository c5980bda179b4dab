"""The tool server of the taskset; verifiers 0.4 starts it as its own process."""

import verifiers.v1 as vf


class LookupTools(vf.Toolset[vf.ToolsetConfig]):
    """Two tools that answer at once."""

    @vf.tool
    def get(self, key: str) -> str:
        """value of a key"""
        return "1"

    @vf.tool
    def add(self, x: int) -> int:
        """add x to the total"""
        return x


if __name__ == "__main__":
    LookupTools.run()
