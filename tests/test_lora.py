"""Bayesian LoRA: posteriors over the weights of PEFT's adapters alone, and ranks that are cut."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayeslim as bl
from bayeslim import likelihoods
from bayeslim.compact import compaction
from bayeslim.errors import BayeslimError, BayeslimWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:Of .* steps .* networks are kept:bayeslim.errors.BayeslimWarning",
)

WORDS = 23
METHODS = {
    "IVON": (bl.IVON(), {"epochs": 2}),
    "Variational": (bl.Variational(), {"epochs": 2}),
    "Laplace": (bl.Laplace(), {}),
    "DeepEnsemble": (bl.DeepEnsemble(2), {"epochs": 2}),
    "SGLD": (bl.SGLD(), {"epochs": 4}),
}


@pytest.fixture(scope="module")
def base() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def adapted(base: nn.Module, rank: int = 4) -> nn.Module:
    """Add an adapter with random weights in both matrices."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


@pytest.mark.parametrize("name", METHODS)
def test_the_weights_of_the_adapter_alone_are_random(name, base, batch):
    method, training = METHODS[name]
    model = adapted(base)
    bnn = bl.bayesianize(model, method, likelihood=likelihoods.Categorical())
    assert set(bnn.sites.names) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in site for site in bnn.sites.names)
    bnn.fit([batch], progress=False, **training)
    for key, value in base.state_dict().items():
        path, _, leaf = key.rpartition(".")
        path = f"{path}.base_layer" if path.endswith(("q_proj", "v_proj")) else path
        assert torch.equal(bnn.mean_network().state_dict()[f"base_model.model.{path}.{leaf}"], value)
    found = bl.predict(bnn, inputs_of(batch), samples=4)
    assert float(found.epistemic.sum()) > 0
    told = batch["labels"] != -100
    scores = bl.metrics.Classification()
    scores.update(found.probs[told], batch["labels"][told])
    nll = -found.probs[told].gather(1, batch["labels"][told][:, None]).log().mean()
    assert scores.compute().nll == pytest.approx(float(nll), rel=1e-4)


def test_a_posterior_is_saved_beside_the_adapter(base, batch, tmp_path):
    bnn = bl.bayesianize(adapted(base), bl.Laplace(), likelihood=likelihoods.Categorical())
    bnn.fit([batch], progress=False)
    bnn.mean_network().save_pretrained(tmp_path)
    wanted = bl.predict(bnn, inputs_of(batch)).probs
    sizes = {}
    for frozen in (True, False):
        folder = tmp_path / f"posterior_{frozen}"
        bl.save(bnn, folder, frozen=frozen)
        sizes[frozen] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True)
        assert torch.equal(bl.predict(bl.load(folder, model=model), inputs_of(batch)).probs, wanted)
    assert sizes[True] - sizes[False] > 4 * sum(p.numel() for p in base.parameters())
    with pytest.raises(BayeslimError, match="Pass the model"):
        bl.load(folder)
    with torch.no_grad():
        model.get_parameter("base_model.model.lm_head.weight").mul_(2)
    with pytest.warns(BayeslimWarning, match="not those that the posterior was saved with"):
        bl.load(folder, model=model)


def test_ranks_that_are_zero_leave_the_adapter(base, batch, tmp_path):
    model = adapted(base)
    with torch.no_grad():
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight[:, 1:] = 0
        model.base_model.model.model.layers[0].self_attn.v_proj.lora_B["default"].weight[:, 2] = 0
    example = inputs_of(batch)
    found = compaction(model, None, example)
    assert "4 of 8 ranks" in found.why
    slim = found.network
    config = slim.peft_config["default"]
    attention = "model.layers.0.self_attn"
    assert config.rank_pattern == {f"{attention}.q_proj": 1, f"{attention}.v_proj": 3}
    assert model.peft_config["default"].rank_pattern == {}
    slim.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    wanted = model(**example).logits
    torch.testing.assert_close(loaded(**example).logits, wanted)
    merged = slim.merge_and_unload()
    assert type(merged) is type(base)
    torch.testing.assert_close(merged(**example).logits, wanted)


def test_ranks_that_an_update_does_not_need_are_cut():
    """The networks differ by a matrix of rank 1 in one layer; an adapter of rank 6 is fitted."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))
    target = copy.deepcopy(plain)
    with torch.no_grad():
        target[0].weight += torch.randn(12, 1) @ torch.randn(1, 8)
    x = torch.randn(500, 8)
    y = target(x).detach() + 0.3 * torch.randn(500, 2)
    loader = [(x[k : k + 100], y[k : k + 100]) for k in range(0, 500, 100)]
    model = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(r=6, lora_alpha=6, target_modules=["0"]))
    recipe = bl.recipes.lora_ranks(strength=3.0, epochs=60)
    bnn = bl.bayesianize(model, likelihood=likelihoods.Gaussian(0.3), **recipe)
    bnn.fit(loader, progress=False, **{**recipe.fit, "lr": 2e-2})
    pruned = bl.prune(bnn, recipe.budget, progress=False, **recipe.cut)
    slim = bl.compact(pruned, x[:4])
    (rank,) = slim.peft_config["default"].rank_pattern.values()
    assert 1 <= rank <= 3
    wanted = pruned.mean_network()(x)
    torch.testing.assert_close(slim(x), wanted)
    torch.testing.assert_close(slim.merge_and_unload()(x), wanted)
    before, after = ((network(x) - target(x)).square().mean() for network in (plain, slim))
    assert after < 0.2 * before
