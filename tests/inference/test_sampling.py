"""A model whose weights stream writes what it writes with all of them in memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaForCausalLM

from offload.errors import CheckpointError, ConfigError, OffloadError
from offload.hf.models import configuration, model_kind
from offload.hf.read import read_model
from offload.inference.sampler import Choices, Sampler
from offload.inference.streamed_model import StreamedModel
from tests.checkpoint.folders import llama
from tests.checkpoint.trained import flip, tokenizer, train
from tests.engine.families import bert, t5, tokens
from tests.matrix import quick
from tests.zoo.families import families

PROMPT = torch.tensor([[7, 31, 12, 40, 9]])
GREEDY = Choices(max_new_tokens=10, temperature=0)
DRAWN = Choices(max_new_tokens=10, temperature=1.5, top_p=0.95, top_k=0, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return folder(name) -> (Hugging Face folder, checkpoint) of the zoo's families, in bf16, with tokenizers."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            family = families()[name]
            trained = train(family.build(calm=True), family.batch(), folder, precision="bf16")
            tokenizer(64).save_pretrained(trained.export)
            made[name] = trained.export, trained.checkpoint
        return made[name]

    return get


def written(
    path: Path, choices: Choices, memory_bytes: int | None, prompt: torch.Tensor = PROMPT, adapter: Path | None = None
) -> list[int]:
    with Sampler(path, dtype=None, memory_bytes=memory_bytes, accelerator=None, adapter=adapter) as sampler:
        sampler.tokenizer.eos_token = None
        return sampler.write(prompt, choices, lambda _text: None).token_ids


def reference(folder: Path, choices: Choices) -> list[int]:
    """Return what transformers writes with all weights in memory."""
    return reference_of(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval(), choices)


def reference_of(model: Any, choices: Choices) -> list[int]:
    drawn = {"do_sample": False}
    if choices.temperature:
        drawn = {"do_sample": True, "temperature": choices.temperature, "top_p": choices.top_p, "top_k": choices.top_k}
    torch.manual_seed(choices.seed)
    found = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=choices.max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **drawn,
    )
    return found[0, PROMPT.shape[1] :].tolist()


def middle(folder: Path) -> int:
    """Return a budget that holds some of a model and not all of it."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) * 4 // 5


@pytest.mark.parametrize(
    "name",
    quick(["llama", "codegen", "prophetnet", "gemma2", "gpt2", "mixtral", "zamba"], ["llama"]),
)
def test_the_same_tokens_whatever_the_budget(name: str, models: Any) -> None:
    """Also where a module reads weights of another (prophetnet), where blocks are shared (zamba), and where tables of
    positions depend on the default dtype (codegen).
    """
    folder, checkpoint = models(name)
    for choices in (GREEDY, DRAWN):
        expected = reference(folder, choices)
        assert len(expected) == 10
        for source in (folder, checkpoint):
            for memory_bytes in (0, middle(folder), None):
                assert written(source, choices, memory_bytes) == expected, (source.name, memory_bytes)
    assert len(set(reference(folder, DRAWN))) > 3  # no loop: a wrong weight would show


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_adapter_writes_with_it(name: str, models: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[peft]'")
    folder, checkpoint = models(name)
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    how: dict[str, Any] = {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}
    if name == "mixtral":
        how = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    config = peft.LoraConfig(r=4, trainable_token_indices=[7, 31], **how)
    over = peft.get_peft_model(base, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in over.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    over.save_pretrained(tmp_path / "adapter")
    expected = reference_of(over.base_model.model.eval(), GREEDY)
    assert expected != reference(folder, GREEDY)
    for source in (folder, checkpoint):
        for memory_bytes in (0, None):
            assert written(source, GREEDY, memory_bytes, adapter=tmp_path / "adapter") == expected
    with pytest.raises(ConfigError, match="nowhere, which is no folder"):
        written(folder, GREEDY, None, adapter=tmp_path / "nowhere")
    whole = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for lacking in (next(name for name in whole if "lora_A" in name), next(name for name in whole if "token" in name)):
        its = {name: value for name, value in whole.items() if name != lacking}
        save_file(its, tmp_path / "adapter" / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match="so it is an adapter of another one"):
            written(folder, GREEDY, None, adapter=tmp_path / "adapter")


@pytest.mark.slow
def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = train(t5(), tokens(), tmp_path, precision="fp32")
    model = AutoModelForSeq2SeqLM.from_pretrained(trained.export).eval()
    found = model.generate(PROMPT, max_new_tokens=10, do_sample=False, eos_token_id=None)
    for memory_bytes in (0, None):
        assert written(trained.checkpoint, GREEDY, memory_bytes) == found[0].tolist()


def test_weights_that_are_changed_from_outside_are_changed_once(tmp_path: Path) -> None:
    """Rwkv divides weights of its blocks when it first infers; the pass that finds this out is repeated."""
    torch.manual_seed(0)
    config = families()["rwkv"].config()
    config.rescale_every, config.num_hidden_layers = 1, 4
    model = families()["rwkv"].model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(tmp_path)
    tokenizer(64).save_pretrained(tmp_path)
    assert written(tmp_path, DRAWN, 0) == reference(tmp_path, DRAWN)


class Counted:
    """A stream over a folder, of which the test sees what is read and what is in memory."""

    def __init__(self, folder: Path, memory_bytes: int | None) -> None:
        config = configuration(folder)
        self.model, self.weights = read_model(model_kind(config).auto, folder, config)
        self.begun: list[str] = []
        self.is_read: dict[str, threading.Event] = {}
        self.stream = StreamedModel(self.model, self.source, memory_bytes=memory_bytes, accelerator=None)
        self.peak = 0
        for module in self.model.modules():
            module.register_forward_pre_hook(lambda *_: self.look())

    def source(self, name: str) -> Any:
        self.begun.append(name)
        self.is_read.setdefault(name, threading.Event()).set()
        return self.weights.source(name)

    def look(self) -> None:
        self.peak = self.stream.ledger.peak_bytes

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(PROMPT, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_budget_is_kept_and_what_fits_is_read_once(name: str, models: Any, tmp_path: Path) -> None:
    config = families()[name].config()
    config.num_hidden_layers = 8
    if name == "gemma2":
        config.layer_types = config.layer_types * 4
    model = families()[name].model_class(config)
    model.save_pretrained(tmp_path)
    layers = [each for each in model.modules() if type(each).__name__.endswith(("Layer", "Block"))]
    blocks = max(sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers)
    head = model.get_output_embeddings().weight.nbytes
    total = sum(parameter.nbytes for parameter in model.parameters())
    read = {}
    for memory_bytes in (0, total * 2 // 3, total, None):
        counted = Counted(tmp_path, memory_bytes)
        logits = [counted.run() for _ in range(4)]
        counted.stream.close()
        assert all(torch.equal(each, logits[0]) for each in logits)
        read[memory_bytes] = counted.stream.bytes_read
        if memory_bytes is not None:
            small = total // 8  # norms and position tables, which stay; the ends of regions, which are filled up
            assert counted.peak <= max(memory_bytes, 2 * max(blocks, head)) + small
    assert read[None] == read[total] == total
    assert total < read[total * 2 // 3] < read[0]
    assert read[0] > 3 * 6 * blocks


def test_the_next_unit_is_read_while_this_one_computes(models: Any) -> None:
    """In the first pass by the order of the modules, later by that of the passes before."""
    counted = Counted(models("llama")[0], 0)
    waited = []

    def wait(*_: Any) -> None:
        waited.append(counted.is_read["model.layers.1.mlp.up_proj.weight"].wait(120))

    counted.model.model.layers[0].mlp.register_forward_hook(wait)
    for _ in range(2):
        counted.is_read["model.layers.1.mlp.up_proj.weight"] = threading.Event()
        counted.run()
    counted.stream.close()
    assert waited == [True, True]


def test_another_order_than_that_of_the_modules_is_learnt_in_one_pass() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return x

    model = Backwards()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    expected = model(torch.ones(16)).detach()

    class Kept:
        def __init__(self, value: torch.Tensor) -> None:
            self.shape, self.dtype, self._flat = tuple(value.shape), value.dtype, value.reshape(-1)

        def read(self, begin: int, end: int) -> torch.Tensor:
            return self._flat[begin:end].clone()

    stream = StreamedModel(model, lambda name: Kept(values[name]), memory_bytes=0, accelerator=None)
    read = []
    for _ in range(4):
        assert torch.equal(model(torch.ones(16)), expected)
        read.append(stream.bytes_read)
    stream.close()
    ahead = 2 * stream.total_bytes // 6  # of the next pass, whether or not they have come by the end of one
    assert abs(read[3] - read[1] - 2 * stream.total_bytes) <= ahead


def test_a_module_that_reads_weights_at_rest_gives_nan_which_is_an_error(models: Any, monkeypatch: Any) -> None:
    """Where the first pass did not show it."""
    folder, _ = models("llama")
    with Sampler(folder, dtype=None, memory_bytes=0, accelerator=None) as sampler:
        model = sampler.model
        calls = []

        def stray(_module: Any, _args: Any, output: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                output.logits += model.model.layers[0].mlp.up_proj.weight.sum()
            return output

        model.register_forward_hook(stray)
        with pytest.raises(OffloadError, match=r"returns NaN.*--memory none"):
            sampler.write(PROMPT, GREEDY, lambda _text: None)


def test_text_comes_as_it_is_written(models: Any) -> None:
    folder, checkpoint = models("llama")
    for path in (folder, checkpoint):
        with Sampler(path, dtype=None, memory_bytes=0, accelerator=None) as sampler:
            pieces: list[str] = []
            done = sampler.write(sampler.encode("the weights"), DRAWN, pieces.append)
            assert "".join(pieces) == sampler.tokenizer.decode(done.token_ids, skip_special_tokens=True)
            assert len(pieces) > 1
            assert done.bytes_read > sampler.stream.total_bytes


def test_the_prompt_may_open_a_conversation_or_be_empty(models: Any) -> None:
    with Sampler(models("llama")[0], dtype=None, memory_bytes=None, accelerator=None) as sampler:
        chat = sampler.tokenizer.decode(sampler.encode("hello", chat=True)[0])
        assert chat == "<|user|>\nhello<|endoftext|><|assistant|>\n" or "<|unknown|>" in chat
        assert sampler.encode("").tolist() == [[sampler.tokenizer.bos_token_id]]
        sampler.tokenizer.chat_template = None
        with pytest.raises(ConfigError, match="no chat template; leave out --chat"):
            sampler.encode("hello", chat=True)


def test_a_text_ends_at_the_tokenizers_end_and_never_at_an_ordinary_token(models: Any) -> None:
    with Sampler(models("llama")[0], dtype=None, memory_bytes=None, accelerator=None) as sampler:
        ordinary = sampler.tokenizer("weights")["input_ids"][0]
        special = sampler.tokenizer.convert_tokens_to_ids("<|user|>")
        end = sampler.tokenizer.eos_token_id
        sampler.model.generation_config.eos_token_id = [ordinary, special]
        assert sampler._generation(GREEDY, 3).eos_token_id == [end, special]
        sampler.model.generation_config.eos_token_id = ordinary
        assert sampler._generation(GREEDY, 3).eos_token_id == [end]


def test_the_models_own_settings_hold_where_nothing_is_given(models: Any) -> None:
    with Sampler(models("llama")[0], dtype=None, memory_bytes=None, accelerator=None) as sampler:
        own = sampler.model.generation_config
        own.do_sample, own.temperature, own.top_p, own.num_beams = True, 0.6, 0.9, 4
        found = sampler._generation(Choices(), 3)
        assert (found.do_sample, found.temperature, found.top_p, found.num_beams) == (True, 0.6, 0.9, 1)
        found = sampler._generation(Choices(top_p=0.5), 3)
        assert (found.do_sample, found.temperature, found.top_p) == (True, 0.6, 0.5)
        assert not sampler._generation(Choices(temperature=0), 3).do_sample
        assert sampler._generation(Choices(max_new_tokens=100), 3).max_new_tokens == 61
        with pytest.raises(ConfigError, match="64 tokens, but the model has positions for only 64"):
            sampler._generation(Choices(), 64)


def test_what_writes_no_text_is_refused(models: Any, tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            Sampler(folder, dtype=None, memory_bytes=None, accelerator=None)

    bert().save_pretrained(tmp_path / "masked")
    tokenizer(64).save_pretrained(tmp_path / "masked")
    refused(tmp_path / "masked", "BertForMaskedLM, a masked language model")
    model = families()["llama"].build()
    model.save_pretrained(tmp_path / "bare")
    refused(tmp_path / "bare", "has no tokenizer")
    model.model.save_pretrained(tmp_path / "base")
    tokenizer(64).save_pretrained(tmp_path / "base")
    refused(tmp_path / "base", r"lack 1 parameter of LlamaForCausalLM, for example lm_head\.weight")


def test_damage_that_is_read_while_writing_is_one_error_that_offers_another(models: Any, tmp_path: Path) -> None:
    _, checkpoint = models("llama")
    for step in (1, 2):
        shutil.copytree(checkpoint, tmp_path / f"step-{step}")
    data = tmp_path / "step-2" / "rank-0.bin"
    for position in range(0, data.stat().st_size, data.stat().st_size // 7):
        flip(data, position)
    match = r"rank-0\.bin is damaged.*The last good one is .*step-1"
    with (
        pytest.raises(CheckpointError, match=match),
        Sampler(tmp_path / "step-2", dtype=None, memory_bytes=0, accelerator=None) as sampler,
    ):
        sampler.write(PROMPT, GREEDY, lambda _text: None)
    assert not any(thread.name == "offload read" for thread in threading.enumerate())


_PEAK = """
import sys, torch
from itertools import pairwise
from pathlib import Path
from offload.inference.sampler import Choices, Sampler
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
with Sampler(Path(sys.argv[1]), dtype=None, memory_bytes=int(sys.argv[2]), accelerator=None) as sampler:
    torch.ones(8, 8) @ torch.ones(8, 8)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    done = sampler.write(torch.tensor([[7, 31, 12]]), Choices(max_new_tokens=4, temperature=0), lambda text: None)
    print(status("VmHWM") - before, sampler.stream.total_bytes, sampler.stream.ledger.peak_bytes, done.bytes_read)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of peak memory")
@pytest.mark.parametrize("memory_mib", [256])
def test_the_peak_is_the_budget_and_not_the_model(memory_mib: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 4000}
    model = LlamaForCausalLM(llama(**sizes, intermediate_size=4096, num_hidden_layers=14)).bfloat16()
    model.save_pretrained(tmp_path)
    tokenizer(64).save_pretrained(tmp_path)
    command = [sys.executable, "-c", _PEAK, str(tmp_path), str(memory_mib << 20)]
    done = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    peak, total, spare, read = map(int, done[-4:])
    print(f"model {total >> 20} MiB, budget {memory_mib}, peak {peak >> 20}, read {read >> 20}")
    assert total > 400 << 20
    assert peak < max(memory_mib << 20, spare) + (100 << 20)
