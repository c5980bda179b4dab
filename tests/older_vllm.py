"""A replica whose vLLM does not say which weights sampled a token. Here, because Ray's processes import it by its name."""

from __future__ import annotations

from agentrl.engines.vllm.replica_actor import VllmActor


class OlderVllm(VllmActor):
    """Without the call that 0.26 lacks, and the field that 0.26 to 0.31 lack."""

    async def start(self) -> int:
        from vllm.outputs import CompletionOutput
        from vllm.v1.engine.async_llm import AsyncLLM

        del AsyncLLM.update_weight_version
        del CompletionOutput.__dataclass_fields__["weight_versions"]
        pid = await super().start()
        assert not self._spans
        return pid
