"""Texts with known domains, and small language models made from configurations."""

import torch

TOKENS, LENGTH = 12, 12


def texts(count, seed, domains=(0, 1, 2), wrong=()):
    """Texts in which each token follows from the one before: domain 0 counts by 1, domain 1 by 2; domain 2 is noise.

    Args:
        wrong: numbers of examples that are noise, too.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        domain = domains[i % len(domains)]
        noise = torch.randint(TOKENS, (LENGTH,), generator=generator).tolist()
        ids = noise if domain == 2 or i in wrong else [(noise[0] + (domain + 1) * j) % TOKENS for j in range(LENGTH)]
        rows.append({"input_ids": ids, "attention_mask": [1] * LENGTH, "labels": ids, "domain": domain, "example": i})
    return rows


def gpt2(attention="sdpa", dropout=0.1, seed=0):
    """A GPT-2 of two layers, whose output is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = dict(vocab_size=TOKENS, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    drops = dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, attn_implementation=attention))


def llama(attention="sdpa", seed=0):
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = dict(vocab_size=TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation=attention))
