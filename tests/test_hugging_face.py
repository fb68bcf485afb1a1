"""Hugging Face models as they are: dict batches, logits, padding, bfloat16, tracing, compaction and configs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.compact import UnitGraph, compaction, units

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:(?s)mkldnn_matmul failed:UserWarning")  # bfloat16 on old CPUs

WORDS = 31
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "max_position_embeddings": 32}
GROUPED = {**SIZES, "vocab_size": WORDS, "num_key_value_heads": 2, "num_hidden_layers": 2}
ENCODER = {**SIZES, "vocab_size": WORDS, "num_hidden_layers": 1, "num_labels": 3}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def build(name: str) -> nn.Module:
    """Make a tiny network with random weights, in eval mode."""
    tf = transformers
    makers = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, **SPECIAL)),
        "qwen": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**{**GROUPED, "num_hidden_layers": 1}, **SPECIAL)),
        "gpt2": lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=4, n_positions=32, n_inner=24, **SPECIAL)
        ),
        "bert": lambda: tf.BertForSequenceClassification(tf.BertConfig(**ENCODER)),
        "tokens": lambda: tf.BertForTokenClassification(tf.BertConfig(**ENCODER)),
        "vit": lambda: tf.ViTForImageClassification(
            tf.ViTConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, image_size=8,
                patch_size=4, num_labels=3,
            )
        ),
        "t5": lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=WORDS, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    network = makers[name]().eval()
    with torch.no_grad():
        for p in network.parameters():  # biases and norms too, so that no error in them can hide
            p.add_(torch.randn_like(p), alpha=0.05)
    return network


def inputs_for(name: str, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    ids = torch.randint(3, WORDS, (2, 7), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    more = {"decoder_input_ids": ids[:, :3]} if name == "t5" else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


def batch_for(name: str) -> dict[str, Tensor]:
    """Make a batch; labels of padding, and of the last word, which has no next one, are -100."""
    inputs = inputs_for(name)
    if name == "bert":
        return {**inputs, "labels": torch.tensor([0, 2])}
    labels = inputs["input_ids"] % 3 if name == "tokens" else F.pad(inputs["input_ids"][:, 1:], (0, 1), value=-100)
    return {**inputs, "labels": labels.masked_fill(F.pad(inputs["attention_mask"][:, 1:], (0, 1)) == 0, -100)}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "tokens"])
def test_networks_fit_and_predict_on_dict_batches(name):
    batch, inputs = batch_for(name), inputs_for(name)
    bnn = bl.bayesianize(build(name), bl.Laplace(), likelihood=likelihoods.Categorical(), num_data=2)
    assert any(site.reason == "embedding, trained as a point" for site in bnn.sites)
    # the loss is the mean over examples, summed over their words; torch's mean leaves out -100 too
    logits = build(name)(**inputs).logits
    words = int((batch["labels"] != -100).sum())
    wanted = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()) * words / 2
    torch.testing.assert_close(bnn.loss(batch, kl_weight=0.0), wanted)
    bnn.fit([batch], progress=False)
    found = bl.predict(bnn, inputs)
    assert found.probs.shape == logits.shape
    assert (found.epistemic > 0).all()


@pytest.mark.parametrize("method", [bl.Laplace("diag"), bl.Laplace("kron"), bl.Laplace("kron", sharing="reduce")])
def test_pads_change_nothing(method):
    batch = batch_for("llama")
    pads = {"input_ids": 5, "attention_mask": 0, "labels": -100}
    longer = {key: F.pad(value, (0, 3), value=pads[key]) for key, value in batch.items()}
    found = []
    for data in (batch, longer):
        bnn = bl.bayesianize(
            build("llama"),
            method,
            likelihood=likelihoods.Categorical(),
            sites="*layers.1.mlp*",
            prior=bl.priors.Normal(100.0),  # the data decide
        )
        bnn.fit([data], progress=False)
        found.append(bnn.posterior_.variance["model.layers.1.mlp.up_proj.weight"])
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", [bl.Variational(), bl.IVON(), bl.Laplace()], ids=lambda m: m.name)
def test_bfloat16(method):
    batch, network = batch_for("bert"), build("bert").to(torch.bfloat16)
    bnn = bl.bayesianize(network, method, likelihood=likelihoods.Categorical())
    bnn.fit([batch], progress=False, **({} if isinstance(method, bl.Laplace) else {"epochs": 1}))
    assert all(p.dtype == torch.bfloat16 for p in bnn.mean_network().parameters())
    assert torch.isfinite(bl.predict(bnn, inputs_for("bert"), samples=3).probs).all()


def test_the_linear_layer_of_gpt2_has_the_factors_of_a_linear_layer():
    torch.manual_seed(0)
    own, plain = transformers.pytorch_utils.Conv1D(3, 5), nn.Linear(5, 3)
    plain.load_state_dict({"weight": own.weight.detach().T, "bias": own.bias.detach()})
    data = [(torch.randn(20, 5), torch.randint(3, (20,)))]
    found = []
    for layer in (own, plain):
        bnn = bl.bayesianize(nn.Sequential(layer), bl.Laplace(), likelihood=likelihoods.Categorical())
        bnn.fit(data, progress=False)
        found.append(bnn.posterior_)
    assert type(found[0]) is type(found[1])
    torch.testing.assert_close(found[0].variance["0.weight"].T, found[1].variance["0.weight"])
    torch.testing.assert_close(found[0].variance["0.bias"], found[1].variance["0.bias"])


def test_patterns_run_along_the_inputs_of_gpt2():
    layer = nn.Sequential(transformers.pytorch_utils.Conv1D(3, 8))
    bnn = bl.bayesianize(layer, bl.Variational(), likelihood=likelihoods.Categorical())
    kept = bl.plan(bnn, granularity="2:4").masks["0.weight"]
    assert bool((kept.mT.reshape(-1, 4).sum(1) == 2).all())


def half_of(graph: UnitGraph, heads: bool) -> list[int]:
    """Choose half of the units of each layer, with heads or without."""
    chosen = []
    for layer, places in graph.by_layer().items():
        if "pooler" not in layer and (heads or graph.units[places[0]].kind == "neuron"):
            chosen += places[: len(places) // 2]
    return chosen


@pytest.mark.parametrize(
    ("name", "heads", "has_new_sizes"),
    [("qwen", True, True), ("t5", True, True), ("vit", True, True), ("gpt2", True, False), ("bert", False, True)],
)
def test_networks_compact_as_their_own_class(name, heads, has_new_sizes, tmp_path):
    """Heads fit into a config only where the width of a head is a number of its own."""
    network, example = build(name), inputs_for(name)
    graph = units(network, example)
    assert {unit.kind for unit in graph.units} == {"neuron", "head"}
    unread = (
        nullcontext()
        if has_new_sizes
        else pytest.warns(bl.errors.BayeslimWarning, match="from_pretrained cannot read it")
    )
    with unread:
        found = compaction(network, graph.masks(half_of(graph, heads)), example, units=graph)
    assert type(found.network) is type(network)
    assert found.difference < 1e-9
    assert ("has the new sizes" in found.why) == has_new_sizes
    assert (network.config.to_dict() != found.network.config.to_dict()) == has_new_sizes
    if has_new_sizes:
        found.network.save_pretrained(tmp_path)
        loaded = type(network).from_pretrained(tmp_path).eval()
        other = inputs_for(name, seed=1)
        assert torch.equal(loaded(**other).logits, found.network(**other).logits)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama")


@pytest.fixture(scope="module")
def llama_units(llama) -> UnitGraph:
    return units(llama, inputs_for("llama"))


def test_heads_of_grouped_queries_go_in_whole_groups(llama_units):
    kinds = {layer: llama_units.units[places[0]].kind for layer, places in llama_units.by_layer().items()}
    heads = [layer for layer, kind in kinds.items() if kind == "head"]
    assert len(heads) == 2
    for layer in heads:
        places = llama_units.by_layer()[layer]
        assert len(places) == 2  # as many as heads of keys and values
        parts = {part.parameter.split(".")[-2]: len(part.indices) for part in llama_units.units[places[0]].incoming}
        assert parts == {"q_proj": 8, "k_proj": 4, "v_proj": 4}


def test_a_uniform_cut_of_a_llama_is_a_llama_with_a_smaller_config(llama, tmp_path):
    example = inputs_for("llama")
    bnn = bl.bayesianize(llama, bl.Variational(), likelihood=likelihoods.Categorical())
    budget = bl.Budget(sparsity=0.3, uniform=True, round_to=4)
    pruned = bl.prune(bnn, budget, granularity="unit", example=example, progress=False)
    slim = bl.compact(pruned, example)
    assert type(slim) is transformers.LlamaForCausalLM
    assert slim.config.intermediate_size < 24
    assert slim.config.intermediate_size % 4 == 0
    assert slim.config.head_dim == 4
    assert slim.config.num_attention_heads == 2 * slim.config.num_key_value_heads
    assert llama.config.intermediate_size == 24
    slim.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    other = inputs_for("llama", seed=1)
    assert torch.equal(loaded(**other).logits, slim(**other).logits)
    torch.testing.assert_close(slim(**other).logits, pruned.mean_network()(**other).logits)
    with_cache = slim.generate(other["input_ids"][:1], max_new_tokens=4, do_sample=False)
    without = slim.generate(other["input_ids"][:1], max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)


def test_the_config_of_a_part_takes_the_new_widths(tmp_path):
    torch.manual_seed(0)
    vision = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        vision_config=vision | {"image_size": 8, "patch_size": 4},
        text_config={"hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 1, "num_attention_heads": 2},
        num_labels=3,
    )
    model = transformers.CLIPForImageClassification(config).eval()
    example = {"pixel_values": torch.randn(2, 3, 8, 8)}
    bnn = bl.bayesianize(model, bl.Variational(), likelihood=likelihoods.Categorical())
    budget = bl.Budget(sparsity=0.1, uniform=True, protect=["*attn*"])
    slim = bl.compact(bl.prune(bnn, budget, granularity="unit", example=example, progress=False), example)
    assert slim.config.vision_config.intermediate_size < 12
    slim.save_pretrained(tmp_path)
    loaded = transformers.CLIPForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**example).logits, slim(**example).logits)


def test_different_widths_leave_the_config_and_export(llama, llama_units, tmp_path):
    example = inputs_for("llama")
    with pytest.warns(bl.errors.BayeslimWarning, match="uniform=True"):
        found = compaction(llama, llama_units.masks(range(6)), example, units=llama_units)
    assert "LlamaConfig cannot describe it: layers have different" in found.why
    assert found.network.config.intermediate_size == 24
    assert found.difference < 1e-9
    exported = bl.export(found.network, tmp_path / "slim.onnx", example=example)  # through torch.export
    assert exported.difference < 1e-5
