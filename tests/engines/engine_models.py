"""Tiny random models that the engine tests build themselves, and what a plain forward pass says of them."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.env import Message, Task, ToolEnv

VOCAB = 400


def build_model(folder, *, seed=0, **changes):
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
        "tie_word_embeddings": True,
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
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in parameters(model).items()}


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


@torch.inference_mode()
def log_table(model, prompt, sampled, *, temperature=1.0):
    """log softmax(z / T) over the vocabulary before each sampled id, in float64 from the float32 logits: [n, V]."""
    ids = torch.tensor([[*prompt, *sampled]])
    scaled = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().numpy() / temperature
    shifted = scaled - scaled.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def kept(probability, top_k, top_p):
    """Tokens that truncation leaves, likeliest first: the `top_k`, then the fewest that reach `top_p` of them."""
    order = np.argsort(-probability)[: top_k or None]
    before = np.cumsum(probability[order] / probability[order].sum()) - probability[order] / probability[order].sum()
    return order[before < top_p] if top_p < 1 else order


@torch.inference_mode()
def ledger_error(model, weights, ledger, *, shift=0):
    """Largest logprob difference to a forward pass under each token's version, or (`shift`) a later one."""
    ids, sampled, versions = torch.tensor(ledger.ids()), torch.tensor(ledger.sampled), torch.tensor(ledger.versions)
    error = torch.zeros(len(ids))
    for version in set(versions[sampled].tolist()):
        model.load_state_dict(weights[(version + shift) % len(weights)], strict=False)
        logp = model(ids.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(-1)
        own = (logp[:-1].gather(1, ids[1:].unsqueeze(1)).squeeze(1) - torch.tensor(ledger.logprobs)[1:]).abs()
        here = (sampled & (versions == version))[1:]
        error[1:][here] = own[here]
    return error.max().item()


class Chat(ToolEnv):
    """A user who answers whatever is said and never ends: episodes of a random model have as many turns as allowed."""

    id = "tests/Chat-v0"

    def make_task(self, rng_seed, split):
        return Task(f"{split}/{rng_seed}", rng_seed, split)

    def prompt(self, task):
        return [Message("user", f"Count from {task.seed % 100}.")]

    async def user_reply(self, message):
        return [Message("user", f"Go on after {len(message.content)}.")]

    @classmethod
    def build(cls):
        """What an EnvRef of it would do."""
        return cls()


CHAT_REWARD = {"agentrl_reward": 1, "name": "chat", "root": {"use": "text.contains", "args": {"expect": ["7"], "where": "all"}}}
