"""Untrained models in normal model folders, small enough for a test."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from workers.arithmetic import character_tokenizer


def make_model(
    folder: Path, *, tied: bool = False, seed: int = 0, layers: int = 2, context: int = 64
) -> Path:
    """A random Qwen2-shaped character model (head size 32, which vLLM's CPU attention takes)."""
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
