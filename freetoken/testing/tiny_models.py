"""Tiny random checkpoints in Hugging Face layout, one per kind of model the engine runs; the oracle is `transformers`.

Weights are redrawn after construction: fresh models have norms of 1 and biases of 0, which would hide a forgotten norm
or bias, and routers so flat that one rounding error changes the experts. Sizes avoid round numbers where kernels have
tails. `transformers` and `tokenizers` are imported when something is built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(5)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": [EOS_ID, IM_END_ID],
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}


def _variants() -> dict[str, Callable[[Any], tuple[Any, Any]]]:
    """name -> (transformers module) -> (model class, config)."""
    return {
        "llama": lambda tf: (tf.LlamaForCausalLM, tf.LlamaConfig(**_COMMON, rope_parameters=_LLAMA3_ROPE)),
        "llama_tied": lambda tf: (tf.LlamaForCausalLM, tf.LlamaConfig(**_COMMON, tie_word_embeddings=True)),
        "llama_bias_yarn": lambda tf: (
            tf.LlamaForCausalLM,
            tf.LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True, rope_parameters=_YARN_ROPE),
        ),
        "llama_linear": lambda tf: (
            tf.LlamaForCausalLM,
            tf.LlamaConfig(
                **{**_COMMON, "num_key_value_heads": 1},
                rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            ),
        ),
        "mistral": lambda tf: (tf.MistralForCausalLM, tf.MistralConfig(**_COMMON, sliding_window=24)),
        "qwen3": lambda tf: (tf.Qwen3ForCausalLM, tf.Qwen3Config(**{**_COMMON, "head_dim": 24})),
        "qwen3_window": lambda tf: (
            tf.Qwen3ForCausalLM,
            tf.Qwen3Config(**_COMMON, use_sliding_window=True, sliding_window=20, max_window_layers=1),
        ),
        "mixtral": lambda tf: (
            tf.MixtralForCausalLM,
            tf.MixtralConfig(
                **{**_COMMON, "intermediate_size": 96}, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
            ),
        ),
        "qwen3_moe": lambda tf: (
            tf.Qwen3MoeForCausalLM,
            tf.Qwen3MoeConfig(
                **{**_COMMON, "num_hidden_layers": 3, "head_dim": 32},
                moe_intermediate_size=40,
                num_experts=16,
                num_experts_per_tok=4,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            ),
        ),
        "qwen3_moe_mixed": lambda tf: (
            tf.Qwen3MoeForCausalLM,
            tf.Qwen3MoeConfig(
                **{**_COMMON, "num_hidden_layers": 6},
                moe_intermediate_size=72,
                num_experts=8,
                num_experts_per_tok=3,
                norm_topk_prob=False,
                decoder_sparse_step=2,
                mlp_only_layers=[3],
            ),
        ),
    }


TINY_MODELS: tuple[str, ...] = tuple(_variants())
TINY_MOE_MODELS: tuple[str, ...] = ("mixtral", "qwen3_moe", "qwen3_moe_mixed")


def build_tiny_model(name: str, *, seed: int = 0, dtype: str = "float32") -> Any:
    """The `transformers` model ``name`` of ``TINY_MODELS`` in evaluation mode; ``dtype`` float32 or bfloat16."""
    import torch
    import transformers

    model_class, config = _variants()[name](transformers)
    config._attn_implementation = "eager"
    model = model_class(config).to(getattr(torch, dtype)).eval()
    _redraw(model, seed)
    model.config.dtype = getattr(torch, dtype)
    model.generation_config.eos_token_id = list(config.eos_token_id)
    model.generation_config.pad_token_id = PAD_ID
    return model


def write_tiny_checkpoint(
    name: str, directory: str | Path, *, seed: int = 0, dtype: str = "float32", chat_template: str = CHAT_TEMPLATE
) -> Path:
    """Write model, tokenizer and chat template to ``directory``, ready to be launched. Returns the directory."""
    directory = Path(directory)
    build_tiny_model(name, seed=seed, dtype=dtype).save_pretrained(directory)
    write_tiny_tokenizer(directory, chat_template)
    return directory


def write_tiny_tokenizer(directory: str | Path, chat_template: str = CHAT_TEMPLATE) -> None:
    """A byte-level BPE tokenizer whose ids are below ``VOCAB_SIZE``: any text encodes, any id decodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[IM_END_ID],
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _COMMON["max_position_embeddings"],
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _redraw(model: Any, seed: int) -> None:
    """Weights that depend on nothing but ``seed`` and their names' order, and where every one of them matters."""
    import torch

    generator = torch.Generator().manual_seed(7919 * (seed + 1))
    tied = model.config.tie_word_embeddings
    num_experts = getattr(model.config, "num_local_experts", None) or getattr(model.config, "num_experts", None)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1.0 + 0.2 * noise
            elif name.endswith("bias"):
                value = 0.2 * noise
            elif "embed_tokens" in name:
                # A tied embedding is also the output matrix: large rows would only ever repeat the last token.
                value = (0.1 if tied else 0.7) * noise
            else:
                router = num_experts is not None and tensor.dim() == 2 and tensor.shape[0] == num_experts
                value = (2.0 if router else 1.0) * noise / math.sqrt(tensor.shape[-1])
            tensor.copy_(value.to(tensor.dtype))
    model.tie_weights()


_CORPUS = (
    "The engine answers one question at a time, and every token of the answer comes from somewhere.",
    "Some experts live in fast memory; the others wait in the store until a token asks for them.",
    "What is the capital of France? Paris is the capital of France.",
    "Write a short story about a fox that learned to count: one, two, three, four, five, six, seven.",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(add(i, 1))\n",
    '{"name": "weather", "arguments": {"city": "Berlin", "unit": "celsius"}}',
    "system user assistant tool\nYou are a helpful assistant.\n",
)
