"""Runs in vLLM's worker processes: loads published weights into the live model.

vLLM adds `WeightReceiver` to its worker class (`worker_extension_cls`) and calls its methods through `collective_rpc`, with
buckets and offers pickled. The engine is paused from `begin` to `end`, since no scheduler step may fall between them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from agentrl.engines.vllm.options import leave_out_tied_head
from agentrl.engines.vllm.transfer import Transfer, open_receiving_end
from agentrl.engines.weights.base import Bucket, Offer, Receiver
from agentrl.utils.errors import ConfigError


class WeightReceiver:
    """Mixin for vLLM's worker that receives weights."""

    vllm_config: Any
    model_config: Any
    model_runner: Any
    rank: int
    device: torch.device
    agentrl_receiver: Receiver | Transfer | None = None

    def _model(self) -> Any:
        model = self.model_runner.get_model()
        leave_out_tied_head(model, getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        return model

    def agentrl_begin(self) -> None:
        """Prepare every layer for new weights and drop the remains of a failed update."""
        with set_current_vllm_config(self.vllm_config):
            model = self._model()
            finalize_layerwise_reload(model, self.model_config)
            # CPU kernels read the experts' weights in a packed layout. vLLM 0.32 packs them when it makes the kernel, but not
            # on a reload: new weights would be read as if packed, without an error. So the kernel is made again. GPU kernels
            # take the weights unpacked, and must stay, since CUDA graphs refer to them.
            for layer in model.modules():
                method: Any = getattr(layer, "quant_method", None)
                experts = isinstance(method, FusedMoEMethodBase)
                if experts and method.moe_kernel and next(layer.parameters()).device.type == "cpu":
                    method.agentrl_kernel, method.moe_kernel = method.moe_kernel, None
            # vLLM repacks a loaded layer (kernel layouts, quantization); this restores the layout of the files, without which
            # new weights would be misplaced or incomplete.
            initialize_layerwise_reload(model)

    def agentrl_load(self, path: str, plain: bytes) -> None:
        """Load a bucket whose bytes are the file `path`. The file may be deleted immediately: the tensors keep its mapping alive
        until the last layer that uses one is complete."""
        bucket: Bucket = pickle.loads(plain)
        tensors = bucket.cut(torch.from_file(path, shared=True, size=bucket.nbytes, dtype=torch.uint8))
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(tensors)

    def agentrl_attach(self, plain: bytes, base: int) -> str:
        """Open this worker's receiver of a route, with index `base` + rank. Returns the reason if it is impossible, or ""."""
        offer: Offer = pickle.loads(plain)
        try:
            receiver = open_receiving_end(offer, base + self.rank, self.vllm_config, self.device, self._model())
        except ConfigError as problem:
            # Returned, not raised: vLLM's calls across processes keep the text of an exception, not its class.
            return str(problem)
        if self.agentrl_receiver is not None:
            self.agentrl_receiver.close()
        self.agentrl_receiver = receiver
        return ""

    def agentrl_receive(self, plain: bytes) -> None:
        """Load a bucket that arrives over the attached route."""
        if self.agentrl_receiver is None:
            raise RuntimeError("no route for weights is attached")
        bucket: Bucket = pickle.loads(plain)
        with set_current_vllm_config(self.vllm_config):
            if isinstance(self.agentrl_receiver, Transfer):
                self.agentrl_receiver.load(bucket)
            else:
                model = self.model_runner.get_model()
                model.load_weights(self.agentrl_receiver.receive(bucket))
                # Copy the tensors that vLLM still refers to, those of incomplete layers, since the bucket's memory is about to
                # be reused.
                for layer in model.modules():
                    for _, bound in get_layerwise_info(layer).loaded_weights:
                        for name, value in bound.arguments.items():
                            if isinstance(value, torch.Tensor) and name != "param":
                                bound.arguments[name] = value.clone()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the trainer overwrites the bucket's memory once this call returns

    def agentrl_end(self) -> list[str]:
        """Finish the layers that wait for the end (attention scales, padded weights). Returns the layers with parameters that got
        no new weights: a loader that bypasses a parameter's `weight_loader` (gpt-oss: experts and sinks) silently loads nothing
        in a reload."""
        model, left, taken = self.model_runner.get_model(), dict[str, set[int]](), set[int]()
        with set_current_vllm_config(self.vllm_config):
            for name, layer in model.named_modules():
                info = get_layerwise_info(layer)
                # While a layer waits for weights its parameters have no memory; `info` holds the real ones.
                held = info.kernel_tensors[0].values() if info.can_load() else layer.parameters(recurse=False)
                memory = {parameter.data_ptr() for parameter in held}
                if info.can_load() and not info.load_numel and memory:
                    left[name] = memory
                else:
                    taken |= memory
            finalize_layerwise_reload(model, self.model_config)
        # Layers without new weights, as after a failed update, keep the old weights and get their old kernel back.
        for layer in model.modules():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "agentrl_kernel", None) is not None:
                method.moe_kernel, method.agentrl_kernel = method.moe_kernel or method.agentrl_kernel, None
        return [name for name, memory in left.items() if memory - taken]  # tied weights are sent for one of their layers only
