"""`agentrl init-model FOLDER --from FILE.gguf`: the model of a GGUF file as a folder that can be trained."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentrl.cli.main import main
from agentrl.render.chatml import CHAT_TEMPLATES
from agentrl.trainer.model_folder import convert_gguf
from agentrl.trainer.pretrained import check_path, load_tokenizer, packaged_tokenizer
from agentrl.utils.errors import ConfigError, ModelError
from tests.run.test_chat_template import NO_TOOLS

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'agentrl[gguf]'")
LAYERS, HIDDEN, HEADS, KV_HEADS = 2, 32, 4, 2
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = LlamaConfig(vocab_size=400, intermediate_size=64, max_position_embeddings=128, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config).eval()


def write(model: LlamaForCausalLM, file: Path, kind: str = "F32", left_out: str = "") -> Path:
    """The model as llama.cpp's converter writes it, with the packaged tokenizer and a template that knows no tools."""
    writer, tokenizer = gguf.GGUFWriter(file, "llama"), packaged_tokenizer(128)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(400)
    writer.add_tokenizer_model("gpt2")
    entries = json.loads(tokenizer.backend_tokenizer.to_str())
    control = {entry["content"] for entry in entries["added_tokens"]}
    tokens = tokenizer.convert_ids_to_tokens(range(400))
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in entries["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(NO_TOOLS)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    tensors = {"token_embd.weight": weights["model.embed_tokens.weight"], "output_norm.weight": weights["model.norm.weight"]}
    for layer in range(LAYERS):
        for ours, theirs in NAMES.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if heads := {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs):
                # GGUF keeps the two halves of a head's rotary dimensions interleaved.
                weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
            tensors[f"blk.{layer}.{theirs}.weight"] = weight
    for name, weight in tensors.items():
        if name == left_out:
            continue
        as_type = gguf.GGMLQuantizationType[kind]
        data = weight if weight.ndim == 1 or kind == "F32" else gguf.quantize(weight, as_type)
        writer.add_tensor(name, data, raw_dtype=as_type if weight.ndim > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 60)[None]).logits


def test_a_float32_file_is_the_same_model_and_its_folder_is_loaded_by_all(model: LlamaForCausalLM, tmp_path: Path) -> None:
    file, folder = write(model, tmp_path / "tiny.gguf"), tmp_path / "made"
    assert main(["init-model", str(folder), "--from", str(file), "--chat-template", "hermes"]) == 0
    made = AutoModelForCausalLM.from_pretrained(folder)
    assert made.dtype == torch.float32 and made.get_output_embeddings().weight is made.get_input_embeddings().weight
    torch.testing.assert_close(logits(made), logits(model), rtol=0, atol=1e-6)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]
    assert (folder / "generation_config.json").is_file()
    tokenizer, packaged = load_tokenizer(str(folder)), packaged_tokenizer(128)
    text = 'Report f + b.\n<tool_call>\n{"name": "get"}\n</tool_call><|im_end|>'
    assert tokenizer.get_vocab() == packaged.get_vocab()
    assert tokenizer.decode(tokenizer(text).input_ids) == text and tokenizer(text).input_ids[-1] == tokenizer.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT_TEMPLATES["hermes"]


def test_a_quantized_file_becomes_plain_weights_near_it(
    model: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = write(model, tmp_path / "tiny.gguf", "Q8_0"), tmp_path / "made"
    assert main(["init-model", str(folder), "--from", str(file), "--dtype", "bfloat16"]) == 0
    assert 'set model.chat_template to "hermes"' in capsys.readouterr().out  # its own knows no tools
    made = AutoModelForCausalLM.from_pretrained(folder)
    assert made.dtype == torch.bfloat16 and "quantization_config" not in (folder / "config.json").read_text()
    torch.testing.assert_close(logits(made.float()), logits(model), rtol=0, atol=0.05)


def test_a_damaged_or_foreign_file_is_named_and_leaves_nothing(model: LlamaForCausalLM, tmp_path: Path) -> None:
    whole = write(model, tmp_path / "whole.gguf")
    cut, short, foreign = (tmp_path / f"{name}.gguf" for name in ("cut", "short", "foreign"))
    cut.write_bytes(whole.read_bytes()[:-4000])
    short.write_bytes(whole.read_bytes()[:400])
    foreign.write_bytes(b"PK\x03\x04 a zip file")
    lacking = write(model, tmp_path / "lacking.gguf", left_out="blk.1.ffn_up.weight")
    problems = {
        cut: "no model can be read from it",
        short: "no model can be read from it",
        foreign: "not a GGUF file",
        lacking: r"lacks weights of its architecture: model\.layers\.1\.mlp\.up_proj\.weight",
        tmp_path / "none.gguf": "cannot be read: No such file",
    }
    for file, problem in problems.items():
        with pytest.raises(ModelError, match=rf"{file.name}: .*{problem}"):
            convert_gguf(file, tmp_path / "made")
        assert not (tmp_path / "made").exists()


def test_what_does_not_fit_the_file_is_refused(
    model: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = write(model, tmp_path / "tiny.gguf"), tmp_path / "made"
    assert main(["init-model", str(folder), "--from", str(file), "--layers", "5"]) == 2
    assert "--layers" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"no token '<.start_header_id.>'"):
        convert_gguf(file, folder, chat_template="llama3")
    with pytest.raises(ModelError, match="init-model FOLDER --from"):
        check_path(str(file))
    assert not folder.exists()
