"""GPT-2's shape, LayerNorm, learned positions, joined and transposed matrices, against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from pageframe.runtime.config import ModelConfig
from pageframe.runtime.errors import InvalidRequestError, ModelError
from pageframe.runtime.llm import LLM
from pageframe.runtime.models.config import load_model_config
from pageframe.runtime.models.decoder import Decoder
from pageframe.runtime.models.loader import load_decoder
from pageframe.runtime.models.source import resolve_source
from pageframe.runtime.models.weights import LayerNorm, RmsNorm, make_norm
from pageframe.runtime.request import SamplingParams

from .helpers import CPU, hf_logits, load, logits_of

VOCAB_SIZE = 65
POSITIONS = 128
PROMPT = torch.randint(0, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(1)).tolist()
CASES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "exact gelu": {"activation_function": "gelu"},
    "another MLP and eps": {"n_inner": 96, "layer_norm_epsilon": 1e-2, "n_head": 2},
    "odd head_dim": {"n_embd": 60},
}


def gpt2_model(**changes: Any) -> Any:
    """A tiny random GPT2LMHeadModel; biases and norms are random too."""
    import transformers

    shape = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = transformers.GPT2Config(**(shape | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "ln_" in name and "weight" in name else 0.0, 0.3)
            else:  # matrices lie [in_features, out_features]; larger values magnify rounding from layer to layer
                parameter.normal_(0.0, 0.3 if "wpe" in name else parameter.shape[0] ** -0.5)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gpt2_model().save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    """Replaces or ("absent") removes keys of config.json."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))


def change_tensors(folder: Path, rename: Any = lambda name: name, **tensors: torch.Tensor) -> None:
    """Renames every tensor and adds some; "__" stands for "." in their names."""
    path = folder / "model.safetensors"
    stored = {rename(name): tensor for name, tensor in load_file(path).items()}
    save_file(stored | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = gpt2_model(**CASES[case])
    model.save_pretrained(tmp_path)
    expected = hf_logits(model, PROMPT)
    decoder = load(tmp_path)
    torch.testing.assert_close(logits_of(decoder, PROMPT), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_of(decoder, PROMPT, chunk=7), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_of(decoder, PROMPT, chunk=1), expected, rtol=0, atol=1e-4)


def test_bare_models_names_and_stored_masks(folder: Path) -> None:
    """The first GPT-2 files: no "transformer." before the names, and each layer's causal mask among the weights."""
    expected = logits_of(load(folder), PROMPT)
    change_tensors(
        folder,
        rename=lambda name: name.removeprefix("transformer."),
        h__0__attn__bias=torch.ones(1, 1, POSITIONS, POSITIONS),
        h__0__attn__masked_bias=torch.tensor(-1e4),
    )
    assert "wte.weight" in load_file(folder / "model.safetensors")
    assert torch.equal(logits_of(load(folder), PROMPT), expected)


def test_weights_that_do_not_fit_are_named_as_they_are_stored(folder: Path) -> None:
    change_tensors(folder, transformer__h__2__attn__c_attn__weight=torch.zeros(192, 64))
    with pytest.raises(ModelError, match=r"h\.2\.attn\.c_attn\.weight' has shape \[192, 64\]; .* asks for \[64, 192\]"):
        load(folder)
    change_tensors(folder, rename=lambda name: name.replace("h.1.ln_1.bias", "h.1.ln_1.offset"))
    with pytest.raises(ModelError, match=r"'transformer\.h\.1\.ln_1\.bias' is missing"):
        load(folder)


def test_config(folder: Path) -> None:
    expected = ModelConfig(
        family="gpt2",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position=POSITIONS,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm="layer",
        learned_positions=POSITIONS,
        activation="gelu_tanh",
        gated_mlp=False,
    )
    source = resolve_source(str(folder))
    assert load_model_config(source) == expected
    change_config(folder, tie_word_embeddings="absent", layer_norm_epsilon="absent", activation_function="absent")
    assert load_model_config(source) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 0}, "n_layer is 0; it must be an integer from 1"),
        ({"n_embd": "absent"}, "n_embd is missing"),
        ({"n_positions": None}, "n_positions is missing"),
        ({"activation_function": "relu"}, "activation_function is 'relu'; only 'gelu_new' or "),
        ({"scale_attn_weights": False}, "scale_attn_weights is False; only True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon is 'x'"),
        ({"eos_token_id": 50256}, "the end-of-text id 50256 is not below vocab_size"),
    ],
)
def test_refused(changes: dict[str, Any], message: str, folder: Path) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(resolve_source(str(folder)))
    assert str(folder / "config.json") in str(caught.value)


def test_a_shorter_context_uses_the_first_positions(folder: Path) -> None:
    source = resolve_source(str(folder))
    config = load_model_config(source).replace(max_position=64)
    decoder = load_decoder(source, config, storage_dtype=torch.float32, compute_dtype=torch.float32, device=CPU)
    assert torch.equal(logits_of(decoder, PROMPT[:64]), logits_of(load(folder), PROMPT[:64]))


def test_bf16_storage_rounds_matrices_and_computes_in_float32(tmp_path: Path) -> None:
    model = gpt2_model()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.bfloat16())
    decoder = load(tmp_path, storage_dtype=torch.bfloat16)
    torch.testing.assert_close(logits_of(decoder, PROMPT), hf_logits(model, PROMPT), rtol=0, atol=1e-4)


def test_random_weights_have_the_shape_of_the_config(folder: Path) -> None:
    config = load_model_config(resolve_source(str(folder)))
    exact, rounded = (
        logits_of(Decoder.random(config, storage_dtype=dtype, compute_dtype=dtype, device=CPU, seed=0), PROMPT)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact.shape == rounded.shape == (len(PROMPT), VOCAB_SIZE)
    assert (exact - rounded).abs().mean() < 0.05 * exact.abs().mean()


def test_norms() -> None:
    x, weight, bias = torch.randn(5, 16) + 3, torch.randn(16), torch.randn(16)
    expected = F.layer_norm(x.double(), (16,), weight.double(), bias.double(), 1e-2)
    norm = make_norm(weight, bias, 1e-2)
    assert isinstance(norm, LayerNorm)
    torch.testing.assert_close(norm(x), expected.float(), rtol=1e-5, atol=1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    assert isinstance(make_norm(weight, None, 1e-2), RmsNorm)


def character_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> str:
    """Writes a tokenizer of characters; returns all of them in the order of their ids, newline and space first."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = "\n " + "".join(chr(ord("!") + index) for index in range(vocab_size - 2))
    tokenizer = Tokenizer(models.WordLevel({character: token_id for token_id, character in enumerate(characters)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return characters


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_served_greedily_beside_others(dtype: str, folder: Path) -> None:
    """Alone and in a batch the same tokens; in float32 those of transformers."""
    characters = character_tokenizer(folder)
    llm = LLM(str(folder), dtype=dtype, num_blocks=64, max_num_batched_tokens=32, max_num_requests=8, threads=1,
              show_progress=False)  # fmt: skip
    assert llm.resolved.max_model_len == POSITIONS
    prompts = [characters[:40], characters[10:17], "\n\n  !", characters]
    params = SamplingParams(temperature=0, max_tokens=POSITIONS - VOCAB_SIZE)
    together = [result.outputs[0] for result in llm.generate(prompts, params)]
    alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    assert [output.text for output in together] == [output.text for output in alone]
    assert all(output.finish_reason == "length" for output in together)
    if dtype == "float32":
        model = gpt2_model()
        for prompt, output in zip(prompts, together, strict=True):
            ids = [characters.index(character) for character in prompt + output.text]
            logits = hf_logits(model, ids[:-1])[len(prompt) - 1 :]
            chosen = logits[torch.arange(len(output.token_ids)), torch.tensor(output.token_ids)]
            assert (logits.max(dim=1).values - chosen).max() < 1e-3


def test_a_prompt_past_the_learned_positions_is_refused(folder: Path) -> None:
    character_tokenizer(folder)
    llm = LLM(str(folder), num_blocks=64, threads=1, show_progress=False)
    with pytest.raises(InvalidRequestError, match=f"the prompt has {POSITIONS} tokens; with max_model_len {POSITIONS}"):
        llm.generate(["!" * POSITIONS])


def test_a_character_without_a_token_is_refused_by_name(folder: Path) -> None:
    character_tokenizer(folder)
    llm = LLM(str(folder), num_blocks=64, threads=1, show_progress=False)
    with pytest.raises(InvalidRequestError, match=r"'é' \(U\+00E9\)"):
        llm.generate(["CAFé"])


@pytest.mark.parametrize("seed", [0, 1])
def test_sampling_from_a_tiny_vocabulary(seed: int, folder: Path) -> None:
    """Filters wider than the vocabulary leave all of it, and those that leave one token are greedy."""
    character_tokenizer(folder)
    llm = LLM(str(folder), dtype="float32", num_blocks=64, threads=1, show_progress=False)

    def text(**params: Any) -> str:
        return llm.generate(["!!"], SamplingParams(max_tokens=40, seed=seed, **params))[0].outputs[0].text

    assert text(temperature=1.0) == text(temperature=1.0, top_k=1000) == text(temperature=1.0, top_k=VOCAB_SIZE)
    assert text(temperature=1.0, top_k=1) == text(temperature=0)
    logprobs = llm.generate(["!!"], SamplingParams(max_tokens=3, logprobs=20))[0].outputs[0].logprobs
    assert logprobs is not None
    assert [len(one.top_ids) for one in logprobs] == [20] * 3
