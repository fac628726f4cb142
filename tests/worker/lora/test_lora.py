"""Each adapter in a mixed batch gives the same results as peft with this adapter alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.config import ModelConfig
from batchinfer.engine.engine import Engine
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.request import Completion
from batchinfer.engine.scheduler.scheduler import Scheduler
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.errors import DeviceError, ModelError
from batchinfer.worker.attention.attention import make_backend
from batchinfer.worker.forward import forward
from batchinfer.worker.fusion.native_layers import NativeDecoderLayers
from batchinfer.worker.kv_cache import KVCache
from batchinfer.worker.loader import LoadedModel, load_model
from batchinfer.worker.lora import adapter_checkpoint
from batchinfer.worker.lora.adapter_checkpoint import LoraConfig, NotSupportedError
from batchinfer.worker.memory import model_bytes
from batchinfer.worker.model_runner import ModelRunner
from batchinfer.worker.sampling.sampler import Sampler
from tests.engine.fake import make_request
from tests.engine.invariants import check_scheduler
from tests.lora import change_adapter, make_adapter
from tests.models import VOCAB_SIZE, make_checkpoint, tiny_model
from tests.worker.step_maker import StepMaker

CPU = torch.device("cpu")
TIE = 1e-4  # logits closer than this count as a tie
OUTPUT_TOKENS = 8
FIRST: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
SECOND: dict[str, Any] = {
    "llama": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 3},
    "gpt2": {"target_modules": r".*\.h\.[02]\..*c_(attn|proj)", "r": 3},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 3},
    "gemma2": {"target_modules": ["k_proj", "o_proj", "up_proj"], "r": 3},
}
PATTERNS: dict[str, Any] = {
    "use_rslora": True,
    "rank_pattern": {"v_proj": 5, "c_attn": 2},
    "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 30, "c_attn": 30, "o_proj": 30},
}


@dataclass
class Adapted:
    """A loaded model with two adapters, and the same models in transformers and peft."""

    loaded: LoadedModel
    alone: list[torch.nn.Module]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    made: dict[str, Adapted] = {}

    def make(family: str) -> Adapted:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            one = make_adapter(tiny_model(family), folder / "one", seed=1, **FIRST)
            two = make_adapter(
                tiny_model(family), folder / "two", seed=2, **SECOND[family], **PATTERNS
            )
            names = {"one": str(folder / "one"), "two": str(folder / "two")}
            model = make_checkpoint(family, folder / "model")
            loaded = load_model(ModelConfig(str(model), adapters=names), device=CPU)
            made[family] = Adapted(loaded, [tiny_model(family), one, two])
        return made[family]

    return make


def run(loaded: LoadedModel, rows: list[tuple[list[int], int]], **limits: int) -> list[Completion]:
    """Generate greedily for rows given as (prompt, adapter)."""
    layout = loaded.layout(4)
    windows, num_blocks = layout.windows, limits.get("num_blocks", 400) * len(layout.windows)
    cache = KVCache(layout, num_blocks, CPU, torch.float32)
    pool = BlockPool(num_blocks, 4, enable_prefix_caching=True, windows=windows)
    table = SequenceTable(limits.get("max_num_seqs", 64), loaded.max_model_len, 4, windows)
    scheduler = Scheduler(pool, table, limits.get("max_tokens", 512))
    engine = Engine(scheduler, ModelRunner(loaded.model, cache, Sampler()))
    for row, (prompt, adapter) in enumerate(rows):
        request = make_request(row, prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0)
        engine.add_request(replace(request, adapter=adapter, eos_token_ids=frozenset()))
    completions: dict[int, Completion] = {}
    while engine.num_unfinished:
        completions |= {done.request.row_id: done for done in engine.step().completions}
        check_scheduler(scheduler)
    return [completions[row] for row in range(len(rows))]


def mixed_rows() -> list[tuple[list[int], int]]:
    """Return prompts with a common prefix, each for both adapters and for the base model."""
    rng = np.random.default_rng(3)
    prefix = rng.integers(2, VOCAB_SIZE, 11).tolist()
    prompts = [prefix + rng.integers(2, VOCAB_SIZE, length).tolist() for length in (1, 6, 9)]
    return [(prompt, adapter) for prompt in prompts for adapter in (2, 0, 1)]


@torch.inference_mode()
def assert_greedy(alone: list[torch.nn.Module], completion: Completion) -> None:
    """Check that each token is the adapter's own choice, except for ties."""
    request, (output,) = completion.request, completion.outputs
    ids = torch.tensor([[*request.prompt_token_ids.tolist(), *output.token_ids.tolist()]])
    logits = alone[request.adapter](input_ids=ids).logits[0, -OUTPUT_TOKENS - 1 : -1]
    taken = logits[torch.arange(OUTPUT_TOKENS), ids[0, -OUTPUT_TOKENS:]]
    assert len(output.token_ids) == OUTPUT_TOKENS
    assert (logits.max(dim=1).values - taken).max() < TIE, f"adapter {request.adapter}"


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens": 5}, {"num_blocks": 16}], ids=["together", "in_chunks", "crowded"]
)
@pytest.mark.parametrize("family", SECOND)
def test_mixed_rows_equal_separate_runs_of_peft(
    adapted: Callable[[str], Adapted], family: str, limits: dict[str, int]
) -> None:
    model, rows = adapted(family), mixed_rows()
    completions = run(model.loaded, rows, **limits)
    for completion in completions:
        assert_greedy(model.alone, completion)
    texts = [tuple(one.outputs[0].token_ids.tolist()) for one in completions]
    assert len(set(texts)) > len(rows) // 3 + 2, "adapters change the outputs"


def logits_of(loaded: LoadedModel, adapters: list[int] | None, lengths: list[int]) -> list[Any]:
    """Return the logits of every token of sequences with these adapters, in one step."""
    rng = np.random.default_rng(0)
    maker = StepMaker(16, 16)
    parts = [(maker.sequence(rng.integers(2, VOCAB_SIZE, n).tolist()), n) for n in lengths]
    step = maker.step(parts, every_logit=True)
    if adapters is not None:
        step = replace(step, adapters=np.array(adapters, dtype=np.int32))
    cache = KVCache(loaded.layout(16), 16, CPU, torch.float32)
    logits = forward(loaded.model, cache, make_backend(cache), step)
    return list(logits.split(lengths))


def test_rows_of_the_base_model_keep_their_bits_in_a_step_with_adapters(
    adapted: Callable[[str], Adapted],
) -> None:
    loaded, lengths = adapted("llama").loaded, [9, 20, 1, 13]
    alone = logits_of(loaded, None, lengths)
    in_company = logits_of(loaded, [0, 1, 0, 2], lengths)
    for at in (0, 2):
        assert torch.equal(alone[at], in_company[at])
    for at in (1, 3):
        assert (alone[at] - in_company[at]).abs().max() > 0.1


def test_rows_of_an_adapter_keep_their_bits_in_any_batch(adapted: Callable[[str], Adapted]) -> None:
    loaded, lengths = adapted("llama").loaded, [9, 20, 1, 13]
    in_company = logits_of(loaded, [1, 2, 1, 2], lengths)
    alone = logits_of(loaded, [1, 0, 0, 0], lengths)
    assert torch.equal(in_company[0], alone[0])
    assert torch.equal(in_company[2], logits_of(loaded, [0, 1, 1, 1], lengths)[2])


def test_steps_without_adapters_run_all_layers_in_one_call(
    adapted: Callable[[str], Adapted],
) -> None:
    loaded = adapted("llama").loaded
    modules = [*loaded.model.modules()]
    (joined,) = [module for module in modules if isinstance(module, NativeDecoderLayers)]
    parts: list[int] = []
    for layer in joined.layers:
        layer.register_forward_hook(lambda *_: parts.append(1))
    logits_of(loaded, None, [5])
    assert len(parts) == 0
    logits_of(loaded, [1], [5])
    assert len(parts) == len(joined.layers) == 3


def test_adapters_are_counted_in_bytes(adapted: Callable[[str], Adapted]) -> None:
    loaded = adapted("phi3").loaded
    assert loaded.adapters == {"one": 1, "two": 2}
    per_layer = {"one": 4 * (32 + 64) + 4 * (32 + 32) + 4 * (32 + 96) + 4 * (48 + 32)}
    per_layer["two"] = 3 * (32 + 64 + 32 + 96)
    wide = 32 + 2 * 32  # phi3 merges q, k and v
    per_layer["one"] += 4 * (wide - 64)
    per_layer["two"] += 3 * (wide - 64)
    assert loaded.adapter_bytes == 4 * 3 * sum(per_layer.values())
    assert model_bytes(loaded.model) == loaded.facts["weight_bytes"] + loaded.adapter_bytes


def test_16_bit_adapters_run_in_the_models_dtype(tmp_path: Path) -> None:
    expected = make_adapter(tiny_model("llama"), tmp_path / "a", seed=1, **FIRST)
    model = make_checkpoint("llama", tmp_path / "model")
    loaded = load_model(
        ModelConfig(str(model), dtype="bfloat16", adapters={"a": str(tmp_path / "a")}), device=CPU
    )
    cache = KVCache(loaded.layout(16), 16, CPU, torch.bfloat16)
    maker, ids = StepMaker(16, 16), list(range(2, 22))
    step = maker.step([(maker.sequence(ids), len(ids))], every_logit=True)
    step = replace(step, adapters=np.array([1], dtype=np.int32))
    got = forward(loaded.model, cache, make_backend(cache), step).float()
    with torch.inference_mode():
        wanted = expected(input_ids=torch.tensor([ids])).logits[0]
    assert (got - wanted).norm() < 0.1 * wanted.norm()


# Refused adapters


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and a valid adapter for it."""
    folder = tmp_path_factory.mktemp("sound")
    make_checkpoint("llama", folder / "model")
    make_adapter(
        tiny_model("llama"), folder / "adapter", seed=1, r=4, target_modules=["q_proj", "v_proj"]
    )
    return folder


@pytest.mark.parametrize(
    ("config", "rename", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'; only LORA adapters"),
        ({"use_dora": True}, {}, "use_dora is set, which is not supported"),
        ({"bias": "all"}, {}, "bias is set, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save is set"),
        ({"something_new": {"a": 1}}, {}, "something_new is set"),
        ({"init_lora_weights": "pissa"}, {}, "'pissa', which changes the base model's weights"),
        ({"r": 5}, {}, r"q_proj.lora_A.weight is 4 x 32, but it should be 5 x 32"),
        ({"r": 0}, {}, "a rank is 0"),
        ({"r": "x"}, {}, "r or rank_pattern has 'x', which is not a number"),
        ({"lora_alpha": 10**400}, {}, "has 1000+, which is not a number or is too large"),
        ({"rank_pattern": [1]}, {}, "rank_pattern must map patterns to numbers"),
        ({"alpha_pattern": {"(": 1}}, {}, r"the pattern .* is invalid"),
        ({"alpha_pattern": {r"(.|..|.\w)+y": 1}}, {}, "takes too long to match"),
        ({"target_modules": ["q_proj"]}, {}, "does not name model.layers.0.self_attn.v_proj"),
        ({"target_modules": "all-linear"}, {}, "names model.layers.0.mlp.down_proj, whose factors"),
        ({}, {"q_proj": "z_proj"}, r"has no linear layer model.layers.0.self_attn.z_proj"),
        ({}, {"q_proj": "k_proj"}, r"k_proj.lora_B.weight is 32 x 4, but it should be 16 x 4"),
        ({}, {"lora_B": "lora_C"}, "lora_C.weight, which is not a LoRA weight of a linear layer"),
        ({}, {"base_model.model.": ""}, "is not a LoRA weight of a linear layer"),
    ],
)
def test_an_adapter_that_cannot_be_run_is_refused_before_weights_load(
    sound: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    rename: dict[str, str],
    message: str,
) -> None:
    shutil.copytree(sound / "adapter", tmp_path / "a")
    change_adapter(tmp_path / "a", config, rename)
    monkeypatch.setattr("batchinfer.worker.loader.load_weights", _not_reached)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(
            ModelConfig(str(sound / "model"), adapters={"mine": str(tmp_path / "a")}), device=CPU
        )
    assert "model.adapters.mine: " in str(caught.value)


def _not_reached(*_: Any) -> None:
    raise AssertionError("weights are loaded")


def test_an_adapter_of_another_model_is_refused(sound: Path, tmp_path: Path) -> None:
    make_adapter(tiny_model("gpt2"), tmp_path / "other", seed=1, target_modules=["c_attn"])
    wide = tiny_model("llama", hidden_size=64)
    make_adapter(wide, tmp_path / "wide", seed=1, target_modules=["q_proj"], r=4)
    for name in ("other", "wide"):
        with pytest.raises(ModelError, match="is not an adapter of this model") as caught:
            load_model(
                ModelConfig(str(sound / "model"), adapters={name: str(tmp_path / name)}), device=CPU
            )
        assert f"model.adapters.{name}: " in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), r"model.adapters.mine: there is no folder"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(
                folder / "adapter_model.bin"
            ),
            "only adapter_model.bin, which can run code when loaded",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x08" + bytes(20)),
            "is not a safetensors file",
        ),
        (
            lambda folder: os.truncate(folder / "adapter_model.safetensors", 900),
            "adapter_model.safetensors",
        ),
    ],
)
def test_a_damaged_adapter_is_refused(
    sound: Path, tmp_path: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    shutil.copytree(sound / "adapter", tmp_path / "a")
    spoil(tmp_path / "a")
    with pytest.raises(ModelError, match=message):
        load_model(
            ModelConfig(str(sound / "model"), adapters={"mine": str(tmp_path / "a")}), device=CPU
        )


def test_the_output_head_is_refused(sound: Path, tmp_path: Path) -> None:
    make_adapter(tiny_model("llama"), tmp_path / "a", seed=1, target_modules=["lm_head"])
    with pytest.raises(ModelError, match=r"it changes the output head \(lm_head\), which is not"):
        load_model(
            ModelConfig(str(sound / "model"), adapters={"a": str(tmp_path / "a")}), device=CPU
        )


def test_experts_are_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "model")
    make_adapter(tiny_model("qwen3_moe"), tmp_path / "a", seed=1, target_modules=["q_proj"])
    load_model(
        ModelConfig(str(tmp_path / "model"), adapters={"a": str(tmp_path / "a")}), device=CPU
    )
    make_adapter(tiny_model("qwen3_moe"), tmp_path / "b", seed=1, target_modules="all-linear")
    with pytest.raises(ModelError, match="target_parameters is set"):
        load_model(
            ModelConfig(str(tmp_path / "model"), adapters={"b": str(tmp_path / "b")}), device=CPU
        )


@pytest.mark.parametrize(
    "at", ["batchinfer.worker.lora.lora_layers._linear", "batchinfer.worker.lora.lora_layers.Probe"]
)
def test_adapter_too_large_for_the_device_is_named(
    sound: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(at, fail)
    with pytest.raises(
        DeviceError, match=r"model\.adapters\.mine does not fit into the device's memory"
    ):
        load_model(
            ModelConfig(str(sound / "model"), adapters={"mine": str(sound / "adapter")}), device=CPU
        )


# Which layers a configuration names, as in peft

NAMES = [f"model.layers.{n}.{part}" for n in (0, 1, 11) for part in ("attn.q_proj", "mlp.up")]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["proj"]},
        {"target_modules": ["attn.q_proj", "model.layers.1.mlp.up"]},
        {"target_modules": r".*\.1\..*"},
        {"target_modules": r"q_proj"},
        {"target_modules": ["q_proj", "up"], "layers_to_transform": [1, 11]},
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "x"]},
        {"target_modules": ["q_proj", "up"], "exclude_modules": ["mlp.up"]},
        {"target_modules": ["q_proj", "up"], "exclude_modules": r".*\.11\..*"},
    ],
)
def test_names_match_like_in_peft(config: dict[str, Any]) -> None:
    from peft import LoraConfig as PeftConfig
    from peft.tuners.tuners_utils import BaseTuner

    theirs = PeftConfig(**config)
    wanted = [n for n in NAMES if BaseTuner._check_target_module_exists(theirs, n)]
    ours = LoraConfig(json.loads(json.dumps({"peft_type": "LORA", **config})))
    assert list(ours.targets(NAMES, "lm_head")) == wanted


def test_the_first_matching_pattern_gives_rank_and_alpha() -> None:
    config = LoraConfig(
        {
            "peft_type": "LORA",
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {"q_proj": 4, r"layers\.1\..*": 2},
        }
    )
    ranks = [config.rank(name) for name in NAMES]
    assert ranks == [4, 8, 4, 2, 4, 8]
    assert config.scale(NAMES[0]) == 4.0


def test_other_peft_types_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="peft_type is None"):
        LoraConfig({})


@pytest.mark.parametrize("value", [5, -1, 1e300, "x", "(", [], [[1]], [{}], {}, {"a": []}, None])
def test_values_of_any_type_are_read_or_refused(value: object) -> None:
    sound = {"peft_type": "LORA", "target_modules": ["q_proj"], "layers_to_transform": [0]}
    for key in adapter_checkpoint._KNOWN_KEYS:
        with suppress(NotSupportedError):
            config = LoraConfig({**sound, key: value})
            for name in config.targets(NAMES, "lm_head"):
                config.scale(name)
