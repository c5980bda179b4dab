"""Tiny random models that the engine tests build themselves, and what a plain forward pass says of them."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

VOCAB = 400


def build_model(folder, *, seed=0, tied=True, **changes):
    """A random Qwen3 whose distributions are far from uniform; returns the folder."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        **changes,
    }
    model = AutoModelForCausalLM.from_config(Qwen3Config(**settings))
    model.save_pretrained(folder)
    return str(folder)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model, seed, scale=0.1):
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in parameters(model).items()
    }


@torch.inference_mode()
def forward_logprobs(model, prompt, sampled, *, temperature=1.0, weights=None):
    """log_softmax(z / T) of the sampled ids, by one plain forward pass without any cache."""
    if weights is not None:
        names = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights.items():
                names[name].copy_(tensor)
    ids = torch.tensor([[*prompt, *sampled]])
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(1, torch.tensor(sampled).unsqueeze(1)).squeeze(1)
